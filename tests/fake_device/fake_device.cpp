// The device "fake": an accelerator for tests, which needs none.
//
// torch reserves the device type PrivateUse1 for backends outside of torch. This one allocates its tensors in host
// memory and computes with the kernels of the CPU, on CPU tensors that share the memory of the arguments. To Python code
// it is an accelerator: its tensors mix with those of the CPU only where CUDA allows it, it has a random generator of
// its own, and backward passes run in autograd's thread of the device. It counts where the host would wait for a device.

#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <cstring>
#include <set>

namespace {

using at::Tensor;
using torch::jit::Stack;

constexpr auto kFake = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kFake, 0);
const c10::DispatchKeySet kFakeKeys(c10::DispatchKey::PrivateUse1);

bool is_fake(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kFake; }

// Counts

std::atomic<int64_t> items{0};           // numbers read by the host: item(), float(), bool()
std::atomic<int64_t> copies_to_host{0};  // cpu(), tolist()
std::atomic<int64_t> copies_to_device{0};
std::atomic<int64_t> waits{0};  // operations within which CUDA waits for a number

// Operations of which CUDA's implementation waits for a number: a size, an equality or an error code.
const std::set<std::string> kWaiting = {
    "aten::nonzero",          "aten::masked_select", "aten::equal",        "aten::_unique2",
    "aten::unique_dim",       "aten::bincount",      "aten::_unique",      "aten::unique_consecutive",
    "aten::repeat_interleave", "aten::_linalg_eigh", "aten::_linalg_svd",  "aten::linalg_eig",
    "aten::_linalg_eigvals",  "aten::linalg_lstsq",  "aten::histc",
};
// Indices may be on the host, and copies are what moves tensors between devices.
const std::set<std::string> kMixing = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_",
    "aten::_foreach_copy_",
};

// Memory

struct FakeAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    return {data, data, &c10::free_cpu, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* target, const void* source, size_t size) const final { default_copy_data(target, source, size); }
};
FakeAllocator allocator;
REGISTER_ALLOCATOR(kFake, &allocator)

void resize_storage(c10::StorageImpl* storage, size_t size) {
  auto memory = allocator.allocate(size);
  if (const size_t kept = std::min(size, storage->nbytes())) {
    std::memcpy(memory.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(size);
}

// Returns a storage of another device on the same memory, which it keeps alive.
c10::Storage shared(const c10::Storage& storage, c10::Device device) {
  auto* owner = new c10::Storage(storage);
  auto release = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
  c10::DataPtr memory(storage.mutable_data(), owner, release, device);
  c10::Allocator* of_device = device == kDevice ? &allocator : c10::GetAllocator(device.type());
  constexpr bool resizable = true;
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), of_device, resizable);
}

// Gives a new tensor the shape of another one.
Tensor with_shape_of(const Tensor& like, Tensor tensor) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

Tensor tensor_on(c10::Storage storage, const Tensor& like, c10::DispatchKeySet keys) {
  return with_shape_of(like, at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype()));
}

// Returns a view, which is a normal tensor even in inference mode if its base is one.
Tensor view_of(const Tensor& base, const Tensor& like) {
  c10::Storage storage = base.storage();
  return with_shape_of(like, at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage),
                                                                      base.key_set(), like.dtype()));
}

// Random generator

// A generator of the device has the algorithm of the CPU's generator, so that equal seeds give equal numbers.
struct FakeGenerator final : at::CPUGeneratorImpl {
  explicit FakeGenerator(uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
    device_ = kDevice;
    key_set_ = kFakeKeys;
  }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<FakeGenerator>();
  return generator;
}

// The generator with which kernels of the CPU draw the numbers of the device.
const at::Generator& twin() {
  static const at::Generator generator = at::detail::createCPUGenerator();
  return generator;
}

void copy_stream(const at::Generator& source, const at::Generator& target) {
  auto* from = static_cast<at::CPUGeneratorImpl*>(source.unsafeGetGeneratorImpl());
  auto* to = static_cast<at::CPUGeneratorImpl*>(target.unsafeGetGeneratorImpl());
  to->set_engine(from->engine());
  to->set_next_float_normal_sample(from->next_float_normal_sample());
  to->set_next_double_normal_sample(from->next_double_normal_sample());
}

// Device, streams and events: one device that computes immediately

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<FakeGenerator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  }
};

// Every operation without a kernel below: a kernel of the CPU, on the same memory

class CallOnHost {
 public:
  CallOnHost(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), name_(op.schema().operator_name().name), stack_(stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const size_t begin = stack_->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      (*stack_)[begin + i] = on_host((*stack_)[begin + i], arguments[i]);
    }
    refuse_mixed_devices();
    if (kWaiting.count(name_) || writes_by_mask_) waits++;
    {
      at::AutoDispatchBelowADInplaceOrView without_autograd;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    if (generator_.defined()) copy_stream(twin(), generator_);
    for (auto& [fake, host] : pairs_) adopt_changes(fake, host);
    const size_t count = op_.schema().returns().size();
    for (auto& value : at::ArrayRef<c10::IValue>(*stack_).slice(stack_->size() - count)) {
      const_cast<c10::IValue&>(value) = on_device(value);
    }
  }

 private:
  c10::IValue on_host(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return on_host(value.toTensor(), argument);
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (argument.name() == "generator") return twin_of(value);
    if (value.isTensorList()) {
      c10::List<Tensor> hosts;
      for (const Tensor& tensor : value.toTensorVector()) hosts.push_back(on_host(tensor, argument));
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> hosts;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        // Reading by a mask calls nonzero() before; writing by a mask waits in the operation itself.
        writes_by_mask_ |= tensor && name_ != "aten::index" && tensor->scalar_type() == at::kBool;
        hosts.push_back(tensor ? std::optional<Tensor>(on_host(*tensor, argument)) : std::nullopt);
      }
      return hosts;
    }
    return value;
  }

  Tensor on_host(const Tensor& tensor, const c10::Argument& argument) {
    if (!is_fake(tensor)) {
      // CUDA takes numbers from the host, tensors without dimensions, unless it writes to them.
      const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
      if (tensor.defined() && (tensor.dim() || is_written)) host_argument_ = argument.name();
      return tensor;
    }
    const c10::Device cpu(c10::kCPU);
    Tensor host = tensor_on(shared(tensor.storage(), cpu), tensor, c10::DispatchKeySet(c10::DispatchKey::CPU));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs_.emplace_back(tensor, host);
    return host;
  }

  // Returns a generator of the CPU, which continues the stream of the device's generator.
  c10::IValue twin_of(const c10::IValue& value) {
    generator_ = value.isNone() ? default_generator() : value.toGenerator();
    TORCH_CHECK(generator_.device() == kDevice, "Expected a 'fake' device type for generator but found '",
                generator_.device(), "' in ", name_);
    copy_stream(generator_, twin());
    return twin();
  }

  void refuse_mixed_devices() const {
    TORCH_CHECK(pairs_.empty() || host_argument_.empty() || kMixing.count(name_),
                "Expected all tensors to be on the same device, but '", host_argument_, "' of ", name_, " is on cpu");
  }

  // Returns the argument on the device that has the memory of a tensor on the host, or an undefined tensor.
  Tensor argument_sharing(const Tensor& result) const {
    const void* memory = result.storage().data();
    for (const auto& [fake, host] : pairs_) {
      if (memory && memory == fake.storage().data()) return fake;
    }
    return {};
  }

  // Gives a tensor the shape and memory that an operation in place has given its counterpart on the host.
  void adopt_changes(const Tensor& fake, const Tensor& host) const {
    if (host.sizes() == fake.sizes() && host.strides() == fake.strides() && host.data_ptr() == fake.data_ptr()) return;
    auto* target = fake.unsafeGetTensorImpl();
    const Tensor base = argument_sharing(host);
    target->set_storage_keep_dtype(base.defined() ? base.storage() : shared(host.storage(), kDevice));
    target->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

  c10::IValue on_device(const c10::IValue& value) const {
    if (value.isTensor()) return on_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> results;
    for (const Tensor& result : value.toTensorVector()) results.push_back(on_device(result));
    return results;
  }

  Tensor on_device(const Tensor& result) const {
    if (!result.defined()) return result;
    for (const auto& [fake, host] : pairs_) {
      if (host.is_same(result)) return fake;
    }
    const Tensor base = argument_sharing(result);
    return base.defined() ? view_of(base, result) : tensor_on(shared(result.storage(), kDevice), result, kFakeKeys);
  }

  const c10::OperatorHandle& op_;
  const std::string name_;
  Stack* stack_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // arguments on the device, with their counterparts on the host
  std::string host_argument_;                     // the name of an argument that must not be on the host
  bool writes_by_mask_ = false;
  at::Generator generator_;  // the device's generator, of an operation that draws
};

void call_on_host(const c10::OperatorHandle& op, Stack* stack) { CallOnHost(op, stack).run(); }

// Kernels: allocation, copies between devices, reading of numbers, and operations on storages

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, kFakeKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           kFakeKeys, c10::dtype_or_default(dtype));
}

Tensor host_view(const Tensor& tensor) {
  if (!is_fake(tensor)) return tensor;
  return tensor_on(shared(tensor.storage(), c10::Device(c10::kCPU)), tensor,
                   c10::DispatchKeySet(c10::DispatchKey::CPU));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (!is_fake(target)) copies_to_host++;
  if (!is_fake(source) && !non_blocking) copies_to_device++;
  host_view(target).copy_(host_view(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.numel() == 0) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const Tensor& tensor) {
  items++;
  return host_view(tensor).item();
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t needed = (c10::multiply_integers(sizes) + self.storage_offset()) * self.element_size();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) resize_storage(storage, needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const int64_t count = source.nbytes() / self.element_size();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(at::IntArrayRef{count}, at::IntArrayRef{1}, 0);
  return self;
}

// torch calls this kernel on accelerators only; the CPU's draws from the generator of the CPU.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const Tensor noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return {input * noise, noise.to(at::kBool)};
}

Tensor native_dropout_backward(const Tensor& gradient, const Tensor& mask, double scale) {
  return gradient * mask * scale;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  // Without these two, torch would compose layer normalisation of other operations, with other roundings.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
  library.impl("native_layer_norm_backward", torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
  library.impl("native_dropout", native_dropout);
  library.impl("native_dropout_backward", native_dropout_backward);
}

// Mixed precision: the operations of the tests' models

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", [] {
    static FakeHooks* hooks = new FakeHooks();  // torch keeps the pointer until the process ends
    at::RegisterPrivateUse1HooksInterface(hooks);
  });
  module.def("counts", [] {
    return std::map<std::string, int64_t>{{"items", items}, {"copies to the host", copies_to_host},
                                          {"copies to the device", copies_to_device}, {"waits", waits}};
  });
  module.def("default_generator", [] { return default_generator(); });
}
