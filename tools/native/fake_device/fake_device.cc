// SPDX-License-Identifier: Apache-2.0
// A PrivateUse1 device on host memory, renamed `musa` by fake_device.py: what torch needs to allocate, view and copy;
// every other operator runs on the CPU through torch's fallback. For tests of dispatch, autograd and patchers without
// hardware.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

namespace {

using at::Tensor;
using Device = std::optional<at::Device>;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Format = std::optional<at::MemoryFormat>;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
    void* data = memory.get();
    const auto release = memory.get_deleter();
    return {data, memory.release_context(), release, at::Device(kPrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  static constexpr auto kPrivateUse1 = c10::DeviceType::PrivateUse1;
};
HostAllocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// One device, one stream, events that have always happened. Like torch_musa 2.7.1 it gives no native handle of a
// stream, so that tensors take the capsule path.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = c10::DeviceType::PrivateUse1;
  static at::Device only() { return at::Device(static_type, 0); }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, only()); }
  c10::DeviceType type() const override { return static_type; }
  at::Device exchangeDevice(at::Device) const override { return only(); }
  at::Device getDevice() const override { return only(); }
  void setDevice(at::Device) const override {}
  void uncheckedSetDevice(at::Device) const noexcept override {}
  c10::Stream getStream(at::Device) const override { return stream(); }
  c10::Stream getDefaultStream(at::Device) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The autograd engine asks whether the device has been used.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};
Hooks hooks;
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, Device, std::optional<bool>, Format format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, Device, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor; a CPU tensor itself.
Tensor on_host(const Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(
      const_cast<void*>(tensor.storage().data()), tensor.sizes(), tensor.strides(), tensor.storage_offset(),
      [tensor](void*) {}, tensor.options().device(at::kCPU));
}
Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  on_host(to).copy_(on_host(self));
  return to;
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, Format) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), size, std::nullopt);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}
void to_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&to_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", [](const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::as_strided_tensorimpl(self, size, stride, std::nullopt);
  });
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", [](const Tensor& self, const Tensor& to) {
    return copy_from(self, resize_(to, self.sizes(), std::nullopt), false);
  });
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.doc() = "registers the device when it is imported"; }
