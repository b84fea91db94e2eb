"""Parts of a step that another compiler makes: inductor, region by region, as operators of the plan."""
