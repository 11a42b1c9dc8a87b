// A torch device on memory of the host: PrivateUse1, with every operator computed by its CPU kernel.
//
// It is as strict as a real accelerator where programs go wrong: a CPU tensor that meets a device tensor is an
// error, so is a device that is used after a fork or that has no memory left. It is synchronous: it finds no
// races between streams.
#include "device.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>

namespace fake {
namespace {

thread_local c10::DeviceIndex current = 0;
std::atomic<pid_t> owner{0};  // the process that initialized the devices

size_t total_memory() {
  static const char* megabytes = getenv("FAKE_MEMORY_MB");
  return (megabytes ? std::strtoull(megabytes, nullptr, 10) : 16384ull) << 20;
}

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "fake:", int(index), " does not exist, there are ", int(device_count()));
  return index;
}

}  // namespace

c10::DeviceIndex device_count() {
  static const char* count = getenv("FAKE_DEVICES");
  return count ? std::clamp(atoi(count), 0, int(MOST)) : 0;
}
c10::DeviceIndex current_device() { return current; }
void set_device(c10::DeviceIndex index) { current = checked(index); }
bool initialized() { return owner == getpid(); }
bool in_bad_fork() { return owner != 0 && owner != getpid(); }
void initialize() {
  TORCH_CHECK(!in_bad_fork(), "Cannot re-initialize fake devices in a forked subprocess");
  owner = getpid();
}

namespace {

// ---- memory -----------------------------------------------------------------------------------------------

// Counts the bytes of each device. Nothing is cached: what is reserved is what is allocated.
struct Memory final : c10::DeviceAllocator {
  std::mutex mutex;
  c10::CachingDeviceAllocator::DeviceStats stats[MOST];

  void add(c10::DeviceIndex device, size_t nbytes) {
    std::lock_guard lock(mutex);
    auto& s = stats[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, s.allocated_bytes[0].current + nbytes <= total_memory(), "fake out of memory. Tried to allocate ",
        nbytes, " bytes on fake:", int(device), ", of which ", total_memory() - s.allocated_bytes[0].current, " are free");
    for (auto* bytes : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes}) (*bytes)[0].increase(nbytes);
    for (auto* blocks : {&s.allocation, &s.segment, &s.active}) (*blocks)[0].increase(1);
  }
  void drop(c10::DeviceIndex device, size_t nbytes) {
    std::lock_guard lock(mutex);
    auto& s = stats[device];
    for (auto* bytes : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes}) (*bytes)[0].decrease(nbytes);
    for (auto* blocks : {&s.allocation, &s.segment, &s.active}) (*blocks)[0].decrease(1);
  }

  // Counts memory that something else owns as memory of the device, until the result is freed.
  c10::DataPtr counted(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device) {
    initialize();
    add(device, nbytes);
    return held(std::move(memory), nbytes, device);
  }
  c10::DataPtr held(c10::DataPtr memory, size_t nbytes, c10::DeviceIndex device) {
    auto* block = new Block{std::move(memory), nbytes, device};
    return {block->bytes.get(), block, &Block::free, c10::Device(KIND, device)};
  }
  struct Block {
    c10::DataPtr bytes;
    size_t nbytes;
    c10::DeviceIndex device;
    static void free(void* block);
  };

  c10::DataPtr allocate(size_t nbytes) override { return on(nbytes, current); }
  c10::DataPtr on(size_t nbytes, c10::DeviceIndex device) {
    initialize();
    if (nbytes == 0) return {nullptr, c10::Device(KIND, device)};
    add(device, nbytes);  // first: memory that does not fit is never allocated on the host
    return held(c10::GetAllocator(c10::DeviceType::CPU)->allocate(nbytes), nbytes, device);
  }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }

  bool initialized() override { return fake::initialized(); }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return stats[checked(device)];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { each(device, &c10::CachingAllocator::Stat::reset_accumulated); }
  void resetPeakStats(c10::DeviceIndex device) override { each(device, &c10::CachingAllocator::Stat::reset_peak); }
  void each(c10::DeviceIndex device, void (c10::CachingAllocator::Stat::*reset)()) {
    std::lock_guard lock(mutex);
    auto& s = stats[checked(device)];
    for (auto* array : {&s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes, &s.allocation, &s.segment, &s.active})
      ((*array)[0].*reset)();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex);
    return {total_memory() - stats[checked(device)].allocated_bytes[0].current, total_memory()};
  }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

void Memory::Block::free(void* block) {
  auto* self = static_cast<Block*>(block);
  memory.drop(self->device, self->nbytes);
  delete self;
}

// Pinned host memory, for copies that need not wait: it is recognized by its addresses.
struct Pinned final : c10::Allocator {
  std::mutex mutex;
  std::map<uintptr_t, size_t> blocks;
  c10::DataPtr allocate(size_t nbytes) override;
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
  bool holds(const void* pointer) {
    std::lock_guard lock(mutex);
    auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (after == blocks.begin()) return false;
    auto [start, nbytes] = *std::prev(after);
    return reinterpret_cast<uintptr_t>(pointer) < start + nbytes;
  }
  void forget(void* pointer) {
    std::lock_guard lock(mutex);
    blocks.erase(reinterpret_cast<uintptr_t>(pointer));
  }
} pinned;

c10::DataPtr Pinned::allocate(size_t nbytes) {
  initialize();
  auto inner = std::make_unique<c10::DataPtr>(c10::GetAllocator(c10::DeviceType::CPU)->allocate(std::max<size_t>(nbytes, 1)));
  void* pointer = inner->get();
  std::lock_guard lock(mutex);
  blocks[reinterpret_cast<uintptr_t>(pointer)] = std::max<size_t>(nbytes, 1);
  auto free = [](void* context) {
    std::unique_ptr<c10::DataPtr> held(static_cast<c10::DataPtr*>(context));
    pinned.forget(held->get());
  };
  return {pointer, inner.release(), free, c10::Device(c10::DeviceType::CPU)};
}

// ---- devices, streams, events -----------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = current;
    set_device(d.index());
    return {KIND, old};
  }
  c10::Device getDevice() const override { return {KIND, current}; }
  void setDevice(c10::Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  // one stream per device
  static c10::Stream only(c10::Device d) { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getStream(c10::Device d) const override { return only(d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return only(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return only(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return only(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return only(s.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  // an event is the moment at which it was recorded
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock::time_point*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto passed = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- random numbers ---------------------------------------------------------------------------------------

// A device's random stream, separate from the CPU's, with the numbers of a CPU generator with the same seed.
struct Generator final : c10::GeneratorImpl {
  at::Generator numbers;
  explicit Generator(c10::DeviceIndex i, at::Generator own = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val))
      : GeneratorImpl(c10::Device(KIND, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), numbers(std::move(own)) {}
  void set_current_seed(uint64_t seed) override { numbers.set_current_seed(seed); }
  uint64_t current_seed() const override { return numbers.current_seed(); }
  uint64_t seed() override { return numbers.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a fake device's generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a fake device's generator has no offset"); }
  void set_state(const c10::TensorImpl& state) override { numbers.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), numbers.clone()); }
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex i) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex k = 0; k < MOST; ++k) made.push_back(at::make_generator<Generator>(k));
    return made;
  }();
  return all[checked(i < 0 ? current : i)];
}

namespace {

// ---- the interface that torch needs -----------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { initialize(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return initialized(); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { set_device(i); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return Guard().exchangeDevice({KIND, i}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  bool isPinnedPtr(const void* pointer) const override { return pinned.holds(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current : i); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = memory.on(nbytes, storage.device().index());
    if (impl->data() && nbytes) memcpy(fresh.get(), impl->data(), std::min<size_t>(nbytes, impl->nbytes()));
    impl->set_data_ptr(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};
struct Install {
  Install() { at::RegisterPrivateUse1HooksInterface(new Hooks()); }
} install;

// ---- tensors ----------------------------------------------------------------------------------------------

bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }

c10::DeviceIndex index_of(std::optional<at::Device> d) { return d && d->has_index() ? checked(d->index()) : current; }

}  // namespace

at::Tensor host(const at::Tensor& t) {
  auto keep = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  at::DataPtr data(t.storage().mutable_data(), new c10::Storage(t.storage()), keep, at::Device(at::kCPU));
  auto* cpu = c10::GetAllocator(c10::DeviceType::CPU);  // kernels resize outputs; take_resized handles it
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), cpu, /*resizable=*/true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

namespace {

// A CPU tensor's bytes as a tensor of the device, which counts them from here on.
at::Tensor device_tensor(const at::Tensor& t, c10::DeviceIndex device) {
  TORCH_CHECK(t.layout() == at::kStrided, "a fake device has strided tensors only");
  auto nbytes = t.storage().nbytes();
  auto keep = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  at::DataPtr data(t.storage().mutable_data(), new c10::Storage(t.storage()), keep, at::Device(at::kCPU));
  auto counted = nbytes ? memory.counted(std::move(data), nbytes, device) : c10::DataPtr(nullptr, c10::Device(KIND, device));
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, std::move(counted), &memory, /*resizable=*/true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

// The arguments of one call as CPU tensors.
struct Call {
  std::string op;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // device tensors, and the same bytes as CPU tensors
  std::vector<at::Tensor> foreign;                       // CPU tensors among the arguments
  std::optional<c10::DeviceIndex> device;

  at::Tensor seen(const at::Tensor& t) {
    if (!ours(t)) {
      if (t.defined() && t.device().is_cpu() && t.dim() > 0) foreign.push_back(t);
      return t;
    }
    TORCH_CHECK(!device || *device == t.device().index() || t.dim() == 0, op, ": tensors on fake:", int(device.value_or(0)), " and on ", t.device());
    if (!device) device = t.device().index();
    pairs.emplace_back(t, host(t));
    return pairs.back().second;
  }

  c10::IValue seen(const c10::IValue& v) {
    if (v.isTensor()) return seen(v.toTensor());
    if (v.isTensorList()) {
      c10::List<at::Tensor> out;
      for (const at::Tensor& t : v.toTensorVector()) out.push_back(seen(t));
      return out;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> out;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) out.push_back(t ? std::make_optional(seen(*t)) : t);
      return out;
    }
    if (v.isDevice() && v.toDevice().type() == KIND) {
      device = index_of(v.toDevice());
      return c10::Device(c10::DeviceType::CPU);
    }
    return v;
  }

  // The device tensor of a result, or a new one with its bytes.
  at::Tensor given_back(const at::Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [own, from_host] : pairs)
      if (from_host.is_same(t)) return own;
    return device_tensor(t, *device);
  }

  c10::IValue given_back(const c10::IValue& v) {
    if (v.isTensor()) return given_back(v.toTensor());
    if (!v.isTensorList()) return v;
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : v.toTensorVector()) out.push_back(given_back(t));
    return out;
  }

  // An output that the kernel has resized: its bytes now have another address.
  void take_resized() {
    for (auto& [own, from_host] : pairs) {
      bool moved = own.storage().data() != from_host.storage().data() && from_host.storage().nbytes();
      if (!moved && own.sizes() == from_host.sizes() && own.strides() == from_host.strides()) continue;
      if (moved) {
        auto fresh = device_tensor(from_host, own.device().index());
        own.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
      }
      own.unsafeGetTensorImpl()->set_sizes_and_strides(from_host.sizes(), from_host.strides(), from_host.storage_offset());
    }
  }
};

bool takes_indices_of_the_host(const std::string& op) {
  return op == "aten::index" || op == "aten::index_put_" || op == "aten::_index_put_impl_" || op == "aten::index_put";
}

// Any operator: its CPU kernel on the same bytes, with random numbers from the device's own stream.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), begin = stack->size() - count;
  Call call{op.operator_name().name};
  for (size_t i = 0; i < count; ++i) (*stack)[begin + i] = call.seen((*stack)[begin + i]);
  if (!call.device) call.device = current;
  TORCH_CHECK(
      call.foreign.empty() || call.pairs.empty() || takes_indices_of_the_host(call.op),
      "Expected all tensors to be on the same device, but found at least two devices, fake:", int(*call.device), " and cpu! (", call.op, ")");

  static const auto optional_generator = c10::getTypePtr<std::optional<at::Generator>>();
  for (size_t i = 0; i < count; ++i) {
    auto& v = (*stack)[begin + i];
    if (!(v.isNone() || v.isGenerator()) || *schema.arguments()[i].type() != *optional_generator) continue;
    auto generator = v.isNone() ? default_generator(*call.device) : v.toGenerator();
    if (generator.device().type() == KIND) v = generator.get<Generator>()->numbers;
  }

  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.take_resized();
  size_t results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; ++i) (*stack)[first + i] = call.given_back((*stack)[first + i]);
}

at::Tensor empty_memory(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(KIND, index_of(device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}
at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(KIND, index_of(device)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  (ours(to) ? host(to) : to).copy_(ours(self) ? host(self) : self);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}
at::Scalar local_scalar(const at::Tensor& t) { return host(t).item(); }
const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  TORCH_CHECK(storage.device().type() == KIND, "set_: a storage on ", storage.device(), " for a tensor on ", t.device());
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return t;
}

// views: the same storage
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto at_offset = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::cpu::as_strided(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_offset);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); }

// operators to which torch gives another name for out-of-tree devices
at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  Call call{"aten::convolution"};
  auto a = call.seen(x), w = call.seen(weight);
  auto b = bias && bias->defined() ? std::make_optional(call.seen(*bias)) : std::nullopt;
  TORCH_CHECK(call.foreign.empty(), "convolution: a tensor on the CPU meets one on ", x.device());
  return call.given_back(at::convolution_symint(a, w, b, stride, padding, dilation, transposed, output_padding, groups));
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  Call call{"aten::convolution_backward"};
  auto g = call.seen(grad), a = call.seen(x), w = call.seen(weight);
  TORCH_CHECK(call.foreign.empty(), "convolution: a tensor on the CPU meets one on ", x.device());
  c10::SymInt channels = transposed ? weight.sym_size(1) * groups : weight.sym_size(0);
  auto sizes = mask[2] ? at::OptionalSymIntArrayRef(c10::SymIntArrayRef(&channels, 1)) : at::OptionalSymIntArrayRef();
  auto [dx, dw, db] = at::convolution_backward_symint(g, a, w, sizes, stride, padding, dilation, transposed, output_padding, groups, mask);
  return {call.given_back(dx), call.given_back(dw), call.given_back(db)};
}
// it draws random numbers but has no generator argument
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  auto mask = at::empty_like(x, x.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {x * mask * (p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty_memory));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("unfold", TORCH_FN(unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());  // otherwise torch decomposes it
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace
}  // namespace fake

// autocast: the same lists as other devices; torch's macros name its types without their namespace
namespace {
using namespace at;
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace
