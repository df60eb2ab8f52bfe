// Kernels. Each is torch's own for the CPU, queued on the current stream.
//
// The host computes shapes with the meta device, allocates the results, and queues a call that
// reads and writes the device's memory at the addresses that its tensors have now. Nothing keeps
// that memory: it is the caller's matter that it lives, in stream order. Ops whose shapes depend
// on data, and values for the host, make the host wait.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

#include "graphs.h"
#include "hooks.h"
#include "memory.h"
#include "queues.h"

namespace queued {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

bool ours(const Tensor& t) { return t.defined() && t.is_privateuseone(); }

// A tensor's place and shape, without a reference to its memory.
struct View {
  void* address;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool conj, neg;

  explicit View(const Tensor& t)
      : address(nullptr),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        dtype(t.scalar_type()),
        conj(t.is_conj()),
        neg(t.is_neg()) {
    if (t.numel() == 0) return;
    size_t extent = 1;
    for (size_t d = 0; d < sizes.size(); d++) extent += (sizes[d] - 1) * strides[d];
    // not `mutable_data_ptr`: Python may show tensors whose memory it must not touch
    address = reach(t.const_data_ptr(), extent * t.element_size());
  }
  Tensor tensor() const {
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    Tensor t = address ? at::from_blob(address, sizes, strides, options)
                       : at::detail::empty_strided_cpu(sizes, strides, dtype);
    if (conj) t._set_conj(true);
    if (neg) t._set_neg(true);
    return t;
  }
};

// -- arguments -----------------------------------------------------------------------------------

// Rebuild an argument with other tensors, wherever it holds some.
template <typename F>
IValue with_tensors(const IValue& value, const F& change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector())
      list.push_back(t.defined() ? change(t).toTensor() : t);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector()) {
      if (t.has_value() && t->defined())
        list.push_back(change(*t).toTensor());
      else
        list.push_back(std::nullopt);
    }
    return list;
  }
  return value;
}

Tensor keep_wrapped(Tensor made, const Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

Tensor on_meta(const Tensor& t) {
  auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return keep_wrapped(std::move(made), t);
}

struct Call {
  c10::OperatorHandle op;
  Stack args;
  //: by position among all tensors of the arguments
  std::vector<View> views;
  bool drawing = false;
};

IValue in_kernel(const IValue& value, const std::vector<View>& views, size_t& next) {
  return with_tensors(value, [&](const Tensor& t) -> IValue {
    return t.is_meta() ? views[next++].tensor() : t;
  });
}

bool draws(const c10::OperatorHandle& op) {
  for (const auto& argument : op.schema().arguments())
    if (argument.name() == "generator") return true;
  return false;
}

Call prepare(const c10::OperatorHandle& op, const Stack& args) {
  Call call{op, {}, {}, draws(op)};
  TORCH_CHECK(call.drawing || !op.hasTag(at::Tag::nondeterministic_seeded),
              op.schema().operator_name(), " draws random numbers from no generator that is given");
  const auto& arguments = op.schema().arguments();
  for (size_t n = 0; n < args.size(); n++) {
    if (args[n].isDevice()) {
      call.args.emplace_back(c10::Device(at::kCPU));
    } else if (arguments[n].name() == "generator") {
      call.args.emplace_back();  // made from the seed of each run
    } else {
      call.args.push_back(with_tensors(args[n], [&](const Tensor& t) -> IValue {
        if (!ours(t)) {
          TORCH_CHECK(t.is_cpu() && t.dim() == 0 || t.numel() < 4096,
                      "Expected all tensors to be on the same device, got one on ", t.device());
          return keep_wrapped(t.clone(), t);
        }
        call.views.emplace_back(t);
        return on_meta(t);
      }));
    }
  }
  return call;
}

// The processor wants a norm's statistics as short as its input, other devices keep them whole.
void shorten_statistics(const c10::OperatorHandle& op, Stack& args) {
  if (op.schema().name() != "aten::native_layer_norm_backward") return;
  const auto dtype = args[1].toTensor().scalar_type();
  for (int n : {3, 4}) args[n] = args[n].toTensor().to(dtype);
}

Stack run_on_host(const Call& call, uint64_t seed = 0) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  at::NoGradGuard no_grad;
  Stack stack;
  size_t next = 0;
  for (size_t n = 0; n < call.args.size(); n++) {
    if (call.drawing && call.op.schema().arguments()[n].name() == "generator")
      stack.emplace_back(at::detail::createCPUGenerator(seed));
    else
      stack.push_back(in_kernel(call.args[n], call.views, next));
  }
  shorten_statistics(call.op, stack);
  call.op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  return stack;
}

// -- results -------------------------------------------------------------------------------------

Tensor empty_like_meta(const Tensor& meta) {
  return Tensor(at::detail::empty_strided_generic(meta.sizes(), meta.strides(), device_allocator(),
                                                  DispatchKeySet(DispatchKey::PrivateUse1),
                                                  meta.scalar_type()));
}

// The argument that a result aliases, as `out` does; -1: it is new.
int aliased(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (!alias) return -1;
  TORCH_CHECK(alias->isWrite(), schema.operator_name(), " is a view, and has no kernel of its own");
  for (size_t n = 0; n < schema.arguments().size(); n++) {
    const auto* other = schema.arguments()[n].alias_info();
    if (other && other->beforeSets() == alias->beforeSets()) return static_cast<int>(n);
  }
  TORCH_CHECK(false, schema.operator_name(), " returns an argument that its schema does not name");
}

struct Waits {
  std::mutex lock;
  std::map<std::string, int64_t> count;
};

Waits& waits() {
  static auto* it = new Waits();
  return *it;
}

void note_wait(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> guard(waits().lock);
  waits().count[toString(op.schema().operator_name())]++;
}

// Shapes of the results; nothing if they are not known before the op has run.
std::optional<Stack> shapes(const Call& call, Stack& meta_args) {
  for (const auto& result : call.op.schema().returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return std::nullopt;
  }
  for (const IValue& arg : call.args) {
    if (arg.isDevice())
      meta_args.emplace_back(c10::Device(at::kMeta));
    else
      meta_args.push_back(arg);
  }
  Stack stack = meta_args;
  try {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    at::NoGradGuard no_grad;
    call.op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return stack;
}

// Resize those arguments that the op resizes, such as an empty `out`.
bool resize_changed(const c10::FunctionSchema& schema, const Stack& args, const Stack& meta_args) {
  bool changed = false;
  for (size_t n = 0; n < args.size(); n++) {
    const auto* alias = schema.arguments()[n].alias_info();
    if (!alias || !alias->isWrite() || !args[n].isTensor() || !ours(args[n].toTensor())) continue;
    const Tensor &real = args[n].toTensor(), &meta = meta_args[n].toTensor();
    if (real.sizes() == meta.sizes()) continue;
    at::native::resize_(real, meta.sizes());
    changed = true;
  }
  return changed;
}

void write_results(const Stack& found, const std::vector<std::vector<View>>& targets) {
  for (size_t n = 0; n < found.size(); n++) {
    if (targets[n].empty()) continue;
    if (found[n].isTensorList()) {
      auto list = found[n].toTensorVector();
      for (size_t k = 0; k < list.size(); k++) targets[n][k].tensor().copy_(list[k]);
    } else if (found[n].toTensor().defined()) {
      targets[n][0].tensor().copy_(found[n].toTensor());
    }
  }
}

// Results of ours in the shapes that `known` has, and where a kernel writes them.
Stack make_results(const c10::FunctionSchema& schema, const Stack& args, const Stack& known,
                   std::vector<std::vector<View>>& targets) {
  Stack results;
  for (size_t n = 0; n < known.size(); n++) {
    targets.emplace_back();
    int same = aliased(schema, n);
    if (same >= 0) {
      results.push_back(args[same]);
    } else if (known[n].isTensor() || known[n].isTensorList()) {
      results.push_back(with_tensors(known[n], [&](const Tensor& t) -> IValue {
        Tensor made = empty_like_meta(t);
        targets.back().emplace_back(made);
        return made;
      }));
    } else {
      results.push_back(known[n]);
    }
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Stack args = torch::jit::pop(*stack, schema.arguments().size());
  Call call = prepare(op, args);
  Stack meta_args;
  auto known = shapes(call, meta_args);
  std::vector<std::vector<View>> targets;
  const int64_t stream = current_stream();
  if (known) {
    if (resize_changed(schema, args, meta_args)) call = prepare(op, args);
    for (IValue& result : make_results(schema, args, *known, targets))
      stack->push_back(std::move(result));
    if (call.drawing) {
      launch_drawing(stream, [call = std::move(call), targets = std::move(targets)](uint64_t seed) {
        write_results(run_on_host(call, seed), targets);
      });
    } else {
      launch(stream, [call = std::move(call), targets = std::move(targets)] {
        write_results(run_on_host(call), targets);
      });
    }
    return;
  }
  note_wait(op);
  synchronize_stream(stream);
  Stack found = run_on_host(call, call.drawing ? draw_seed() : 0);
  for (IValue& result : make_results(schema, args, found, targets))
    stack->push_back(std::move(result));
  // behind the work that still uses the results' memory
  launch(stream, [&] { write_results(found, targets); });
  synchronize_stream(stream);
}

// -- memory, views and copies --------------------------------------------------------------------

void check_layout(std::optional<c10::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "queued tensors are strided");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "only memory of the host can be pinned");
}

Tensor empty(at::IntArrayRef size, std::optional<c10::ScalarType> dtype,
             std::optional<c10::Layout> layout, std::optional<c10::Device>,
             std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  check_layout(layout, pinned);
  return Tensor(at::detail::empty_generic(size, device_allocator(),
                                          DispatchKeySet(DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                     std::optional<c10::Device>, std::optional<bool> pinned) {
  check_layout(layout, pinned);
  return Tensor(at::detail::empty_strided_generic(size, stride, device_allocator(),
                                                  DispatchKeySet(DispatchKey::PrivateUse1),
                                                  c10::dtype_or_default(dtype)));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const int64_t stream = current_stream();
  bool inward = source.is_cpu(), outward = target.is_cpu();
  const Tensor& host = inward ? source : target;
  bool pinned = (inward || outward) && host.numel() &&
                is_pinned(host.const_data_ptr(), host.storage().nbytes() -
                                                     host.storage_offset() * host.element_size());
  if ((inward || outward) && !pinned) {
    if (GraphPtr graph = graph_of(stream)) forbid(graph, "it copies memory that is not pinned");
  }
  if (inward && !pinned) {
    // from pageable memory: read before this returns
    Tensor staged = at::clone(source);
    launch(stream, [staged, to = View(target)] { to.tensor().copy_(staged); });
    if (!non_blocking) synchronize_stream(stream);
  } else if (outward && !pinned) {
    Tensor staged = at::detail::empty_strided_cpu(target.sizes(), target.strides(),
                                                  target.scalar_type());
    launch(stream, [staged, from = View(source)] { staged.copy_(from.tensor()); });
    synchronize_stream(stream);
    target.copy_(staged);
  } else {
    launch(stream, [to = View(target), from = View(source)] { to.tensor().copy_(from.tensor()); });
    if ((inward || outward) && !non_blocking) synchronize_stream(stream);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar value_of(const Tensor& t) {
  std::optional<at::Scalar> found;
  const int64_t stream = current_stream();
  launch(stream, [&, from = View(t)] { found = at::native::_local_scalar_dense_cpu(from.tensor()); });
  synchronize_stream(stream);
  return *found;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_whole(Tensor& self, at::Storage storage) {
  return at::native::set_(self, std::move(storage));
}

void record_stream(Tensor& self, c10::Stream stream) {
  use_on(self.storage().mutable_data(), stream.id());
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", value_of);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("native_dropout", TORCH_FN(at::native::native_dropout_cpu));
  m.impl("record_stream", record_stream);
  // those that torch would compose of others, or refuse
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm",
                           "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace queued

// How often ops made the host wait, by name, a line each; returns the bytes written.
extern "C" int64_t queued_waits(char* text, int64_t room) {
  std::string told;
  std::lock_guard<std::mutex> guard(queued::waits().lock);
  for (const auto& [name, count] : queued::waits().count)
    told += name + " " + std::to_string(count) + "\n";
  told.resize(std::min<size_t>(told.size(), room));
  told.copy(text, told.size());
  return static_cast<int64_t>(told.size());
}
