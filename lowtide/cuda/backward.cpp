// A backward pass for tensors of a device that is not here: the order, hooks and sums of torch's engine, on the thread that asks.
//
// That engine asks the device for its streams. Where torch has a CUDA build and no GPU, or no CUDA at all, nobody can answer, so that it
// refuses each backward pass of fake tensors that say they lie there. Nodes, their hooks and what is checked of their results are torch's.
// Where gradients of a few tensors are asked for, torch's engine tells its nodes which of their results they may leave out. Here they make
// all: what nobody reads is no part of the program.
#define AT_PER_OPERATOR_HEADERS  // else torch's headers read all operators, which takes a quarter of the time
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <atomic>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// Of Python and of torch's part for it, whose headers are not everywhere.
extern "C" struct _object* Py_BuildValue(const char*, ...);
namespace torch::autograd {
::_object* functionToPyObject(const decltype(Edge::function)& node);
}

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

struct Ready {
  decltype(torch::autograd::Edge::function) node;  // shared, by one type or another
  variable_list grads;
};
struct Later {  // as torch orders its queue, so that equals come in the same order, too
  bool operator()(const Ready& one, const Ready& other) const { return one.node->sequence_nr() < other.node->sequence_nr(); }
};
struct Asked {  // of a node, where gradients of certain tensors are wanted
  bool needed = false;
  std::vector<std::pair<size_t, size_t>> captures;  // which of its gradients is which result
};

variable_list hooked(const std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& hooks, variable_list grads) {
  for (const auto& hook : hooks) grads = (*hook)(grads);
  return grads;
}
variable_list hooked_as_tensors(Node& node, variable_list grads) {
  grads = hooked(node.tensor_pre_hooks(), std::move(grads));
  for (const auto& [at, hook] : node.retains_grad_hooks()) grads = (*hook)(grads);
  return grads;
}

template <typename T>
struct Within {  // a variable has another value, until this is gone
  Within(T& variable, T value) : variable(variable), before(std::exchange(variable, value)) {}
  ~Within() { variable = before; }
  T& variable;
  const T before;
};
std::atomic<int64_t> passes{0};
thread_local int64_t current = -1;  // which pass this thread is in
thread_local const decltype(torch::autograd::Edge::function)* evaluated = nullptr;  // its node

class Pass {
 public:
  Pass(bool keeps_graph, size_t results) : keeps_graph(keeps_graph), results(results) {}

  void want(Node* node, size_t input, size_t result, bool accumulates) {
    Asked& asked = wanted[node];
    if (accumulates) asked.needed = true;
    else asked.captures.emplace_back(input, result);
  }

  variable_list run(const torch::autograd::edge_list& roots, const variable_list& grads) {
    for (const auto& root : roots) count(root.function.get());
    if (!wanted.empty()) mark(roots);
    for (size_t at = 0; at < roots.size(); ++at) deliver(roots[at], grads[at]);
    while (!queue.empty()) {
      Ready next = queue.top();
      queue.pop();
      const Within<const decltype(next.node)*> node(evaluated, &next.node);
      evaluate(*next.node, std::move(next.grads));
    }
    return std::move(results);
  }

 private:
  const bool keeps_graph;
  variable_list results;
  std::priority_queue<Ready, std::vector<Ready>, Later> queue;
  std::unordered_map<Node*, int> missing;  // gradients that are still to come
  std::unordered_map<Node*, variable_list> waiting;
  std::unordered_map<Node*, Asked> wanted;  // empty where all is

  void count(Node* root) {
    std::vector<Node*> pending;
    if (missing[root]++ == 0) pending.push_back(root);
    while (!pending.empty()) {
      Node* const node = pending.back();
      pending.pop_back();
      for (const auto& edge : node->next_edges())
        if (edge.is_valid() && missing[edge.function.get()]++ == 0) pending.push_back(edge.function.get());
    }
  }

  void mark(const torch::autograd::edge_list& roots) {  // whatever leads to what is wanted is needed
    std::vector<std::pair<Node*, size_t>> path;
    std::unordered_set<Node*> seen;
    for (const auto& root : roots) {
      if (seen.insert(root.function.get()).second) path.emplace_back(root.function.get(), 0);
      while (!path.empty()) {
        auto& [node, at] = path.back();
        if (at < node->next_edges().size()) {
          Node* const next = node->next_edges()[at++].function.get();
          if (next && seen.insert(next).second) path.emplace_back(next, 0);
          continue;
        }
        bool needed = false;
        for (const auto& edge : node->next_edges())
          if (const auto found = wanted.find(edge.function.get()); found != wanted.end())
            needed = needed || found->second.needed || !found->second.captures.empty();
        if (needed) wanted[node].needed = true;
        path.pop_back();
      }
    }
  }

  void deliver(const torch::autograd::Edge& edge, Tensor grad) {
    Node* const node = edge.function.get();
    const bool is_ready = --missing.at(node) == 0;
    auto found = waiting.find(node);
    if (found == waiting.end()) {
      if (!wanted.empty() && !wanted.count(node)) return;
      found = waiting.emplace(node, variable_list(node->num_inputs())).first;
    }
    Tensor& sum = found->second.at(edge.input_nr);
    if (grad.defined()) sum = sum.defined() ? at::add(sum, grad) : std::move(grad);
    if (is_ready) {
      queue.push({edge.function, std::move(found->second)});
      waiting.erase(found);
    }
  }

  void evaluate(Node& node, variable_list grads) {
    if (!wanted.empty()) {
      const Asked& asked = wanted.at(&node);
      const variable_list captured = asked.needed ? grads : hooked_as_tensors(node, grads);
      for (const auto& [input, result] : asked.captures) results[result] = captured[input];
      if (!asked.needed) return;
    }
    grads = hooked(node.pre_hooks(), hooked_as_tensors(node, std::move(grads)));
    if (!keeps_graph) node.will_release_variables();
    const bool hooks = !node.post_hooks().empty();  // else nobody else holds the gradients, and a leaf may keep what it is given
    variable_list made = node(hooks ? variable_list(grads) : std::move(grads));
    torch::autograd::validate_outputs(
        node.next_edges(), made, [&](const std::string& what) { return "Function " + node.name() + " returned an " + what; });
    for (const auto& hook : node.post_hooks()) made = (*hook)(made, grads);
    if (!keeps_graph) node.release_variables();
    grads.clear();
    for (size_t at = 0; at < made.size(); ++at)
      if (const auto& next = node.next_edge(at); next.is_valid()) deliver(next, std::move(made[at]));
  }
};

c10::List<std::optional<Tensor>> backward(
    const std::vector<Tensor>& roots, const c10::List<std::optional<Tensor>>& given, bool keeps_graph, bool creates_graph,
    const std::vector<Tensor>& inputs, bool accumulates) {
  torch::autograd::edge_list edges;
  variable_list grads;
  for (size_t at = 0; at < roots.size(); ++at) {
    edges.push_back(torch::autograd::impl::gradient_edge(roots[at]));
    TORCH_CHECK(edges.back().function, "element ", at, " of tensors does not require grad and does not have a grad_fn");
    grads.push_back(given.get(at).value_or(Tensor()));
  }
  torch::autograd::validate_outputs(edges, grads, [](const std::string& what) { return what; });
  Pass pass(keeps_graph, inputs.size());
  for (size_t at = 0; at < inputs.size(); ++at) {
    TORCH_CHECK(inputs[at].requires_grad(), "One of the differentiated Tensors does not require grad");
    if (inputs[at].grad_fn()) {
      if (accumulates) inputs[at].retain_grad();
      pass.want(inputs[at].grad_fn().get(), inputs[at].output_nr(), at, accumulates);
    } else if (const auto leaf = torch::autograd::impl::try_get_grad_accumulator(inputs[at])) {
      pass.want(leaf.get(), 0, at, accumulates);
    } else {
      pass.want(nullptr, 0, at, false);  // nothing leads to it, and not all is wanted
    }
  }
  const at::AutoGradMode mode(creates_graph);
  const Within<int64_t> pass_number(current, passes++);
  const Within<const decltype(torch::autograd::Edge::function)*> node(evaluated, nullptr);
  c10::List<std::optional<Tensor>> found;
  for (Tensor& each : pass.run(edges, grads)) found.push_back(each.defined() ? std::optional<Tensor>(std::move(each)) : std::nullopt);
  return found;
}

// Where torch has no CUDA, autograd finds no guard for its devices: one that does nothing.
auto& place() { return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)]; }
bool guard() {
  static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> nobodys;
  const c10::impl::DeviceGuardImplInterface* none = nullptr;
  return place().compare_exchange_strong(none, &nobodys);
}
void unguard() { place().store(nullptr); }

}  // namespace

extern "C" struct _object* lowtide_evaluated() { return evaluated ? torch::autograd::functionToPyObject(*evaluated) : Py_BuildValue(""); }

TORCH_LIBRARY(lowtide_absent, library) {
  library.def("backward(Tensor[] roots, Tensor?[] grads, bool keeps_graph, bool creates_graph, Tensor[] inputs, bool accumulates) -> Tensor?[]", backward);
  library.def("current() -> int", [] { return current; });
  library.def("guard() -> bool", guard);
  library.def("unguard() -> ()", unguard);
}
