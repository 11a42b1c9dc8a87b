// What the two parts of the fake accelerator share: its memory, its devices, its tensors as CPU tensors.
#pragma once
#include <ATen/ATen.h>

namespace fake {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex MOST = 16;

// Devices that exist, by the environment variable FAKE_DEVICES; counting them initializes nothing.
c10::DeviceIndex device_count();

// The device of this thread.
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex index);

// Whether this process has used a device. A child that is forked afterwards cannot, as with a real driver.
bool initialized();
bool in_bad_fork();
void initialize();

// The random stream of a device. It can be seeded before the device is initialized.
const at::Generator& default_generator(c10::DeviceIndex index);

// The same bytes as a CPU tensor.
at::Tensor host(const at::Tensor& tensor);

}  // namespace fake
