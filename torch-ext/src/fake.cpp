// Fake GPUs for tests: they compute nothing and log every request.

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>

namespace {

constexpr c10::DeviceIndex kCount = 8;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kCount> current_streams = {};
thread_local int64_t streams = 0, events = 0;
thread_local std::string requests;

std::string named(const void* event) {
  return "event " + std::to_string(*static_cast<const int64_t*>(event));
}

std::string named(const c10::Stream& stream) {
  return "stream " + std::to_string(stream.device_index()) + "." + std::to_string(stream.id());
}

struct Fake final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override {
    return {c10::kCUDA, current_device};
  }
  void setDevice(c10::Device device) const override {
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kCount;
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams.at(device.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, ++streams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams.at(stream.device_index()) = stream.id();
    requests += "enter " + named(stream) + "\n";
    return before;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new int64_t(++events);
    requests += named(*event) + " in " + named(stream) + "\n";
  }
  void block(void* event, const c10::Stream& stream) const override {
    requests += named(stream) + " waits for " + named(event) + "\n";
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void* event) const override {
    requests += "host waits for " + named(event) + "\n";
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<int64_t*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& stream) const override {
    requests += named(stream) + " uses\n";
  }
};

} // namespace

// Registers the fake as the process's implementation of GPU streams and events.
extern "C" void draftmill_fake_gpus() {
  static const c10::impl::DeviceGuardImplRegistrar registered(c10::kCUDA, new Fake());
}

// Requests of this thread since the last call; valid until the next one.
extern "C" const char* draftmill_fake_log() {
  static thread_local std::string log;
  log = std::move(requests);
  requests.clear();
  return log.c_str();
}
