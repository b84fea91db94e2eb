{% set guard = "LOWTIDE_" ~ c_name(plan.graph.name) ~ "_PLAN_H" %}
#ifndef {{ guard }}
#define {{ guard }}

/* {{ comment(plan.graph.name) }}: {{ plan.status.name.lower() }}. */

{% for memory in plan.spaces %}
#define {{ unique(memory.name, "ARENA_BYTES") }} {{ plan.arena_bytes[loop.index0] }}u  /* aligned to {{ memory.align_bytes }} */
{% endfor %}

#define PLAN_STEPS {{ plan.order | length }}u
#define PLAN_ORDER {{ braced(plan.order) }}  /* nodes */

{% for block in plan.blocks %}
{% set name, steps = plan.spaces[block.space].name, "steps %s to %s" | format(block.start, block.end - 1) %}
{% for tensor in block.tensors %}
#define {{ unique("tensor_" ~ plan.graph.tensors[tensor].name, "OFFSET") }} {{ block.offset_bytes + block.start_of(tensor) }}u  /* {{ name }}, {{ plan.graph.tensors[tensor].size_bytes }} bytes, {{ steps }} */
{% else %}
#define {{ unique("workspace", "OFFSET") }} {{ block.offset_bytes }}u  /* {{ name }}, {{ block.size_bytes }} bytes, {{ steps }} */
{% endfor %}
{% endfor %}
{% for index, name, cut, rings in cuts %}

/* node {{ index }}: {{ comment(name) }}; first, last, axis, band axis, band, staged */
#define PLAN_CUT_{{ index }} {{ braced(cut) }}
#define PLAN_CUT_{{ index }}_RINGS {{ braced(rings) }}  /* offset in the workspace, slots, bytes of each */
{% endfor %}
{% if moves %}

/* before step, from space, from offset, to space, to offset, bytes */
#define PLAN_MOVES {{ braced(moves) }}
#define PLAN_MOVE_COUNT {{ moves | length }}u
{% endif %}

#endif
