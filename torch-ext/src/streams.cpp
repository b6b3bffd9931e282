// CUDA streams and events, pinned memory, and asynchronous copies.
//
// The device type is always CUDA, and an index selects the GPU. Uses libtorch's table of device implementations,
// without CUDA headers.
//
// An event switches to its GPU and back to the thread's GPU, which on a new thread is the first one. That alone would
// allocate memory on the first GPU, or fail if another process uses it. A device guard, which restores the device
// without this effect, therefore surrounds each call.

#include "guard.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

using namespace draftmill;

struct DraftmillStream {
  int64_t id;
  int32_t gpu;
};

namespace {

c10::Device device(int32_t gpu) {
  if (gpu < 0 || gpu > std::numeric_limits<c10::DeviceIndex>::max()) {
    throw Unsuitable("CUDA device " + std::to_string(gpu) + " does not exist in this process");
  }
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(gpu)};
}

c10::impl::VirtualGuardImpl gpus() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA);
}

c10::Stream unpacked(const DraftmillStream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, device(stream.gpu), stream.id);
}

DraftmillStream packed(const c10::Stream& stream) {
  return {stream.id(), stream.device_index()};
}

} // namespace

extern "C" {

int draftmill_stream_current(int32_t gpu, DraftmillStream* stream) noexcept {
  return guarded([&] { *stream = packed(gpus().getStream(device(gpu))); });
}

// Stream from libtorch's pool, which never frees streams.
int draftmill_stream_new(int32_t gpu, DraftmillStream* stream) noexcept {
  return guarded([&] { *stream = packed(gpus().getStreamFromGlobalPool(device(gpu))); });
}

// Makes `stream` the current one of this thread; `before` receives the previous one.
int draftmill_stream_enter(const DraftmillStream* stream, DraftmillStream* before) noexcept {
  return guarded([&] { *before = packed(gpus().exchangeStream(unpacked(*stream))); });
}

int draftmill_stream_wait(const DraftmillStream* stream, const c10::Event* event) noexcept {
  return guarded([&] {
    const c10::DeviceGuard there(device(stream->gpu));
    event->block(unpacked(*stream));
  });
}

// Delays reuse of the tensor's memory until the current work of this stream is finished.
int draftmill_stream_uses(const DraftmillStream* stream, const at::Tensor* tensor) noexcept {
  return guarded([&] { gpus().recordDataPtrOnStream(tensor->storage().data_ptr(), unpacked(*stream)); });
}

int draftmill_event_record(const DraftmillStream* stream, c10::Event** event) noexcept {
  return guarded([&] {
    const c10::DeviceGuard there(device(stream->gpu));
    auto made = std::make_unique<c10::Event>(c10::kCUDA);
    made->record(unpacked(*stream));
    *event = made.release();
  });
}

int draftmill_event_query(const c10::Event* event, bool* complete) noexcept {
  return guarded([&] {
    const c10::DeviceGuard there(event->device());
    *complete = event->query();
  });
}

int draftmill_event_wait(const c10::Event* event) noexcept {
  return guarded([&] {
    const c10::DeviceGuard there(event->device());
    event->synchronize();
  });
}

int draftmill_event_drop(c10::Event* event) noexcept {
  return guarded([&] {
    const std::unique_ptr<c10::Event> dropped(event);
    const c10::DeviceGuard there(event->device());
    // Destroys the event while the guard is active.
    *dropped = c10::Event(c10::kCUDA);
  });
}

int draftmill_pinned(int64_t bytes, at::Tensor** memory) noexcept {
  return guarded([&] {
    const auto options = at::TensorOptions(at::kByte).pinned_memory(true);
    *memory = std::make_unique<at::Tensor>(at::empty({bytes}, options)).release();
  });
}

// Copies in this thread's stream; the host does not wait if its memory is pinned.
int draftmill_copy(const at::Tensor* to, const at::Tensor* from) noexcept {
  return guarded([&] {
    if (to->sizes() != from->sizes() || to->scalar_type() != from->scalar_type()) {
      throw Unsuitable("non-blocking copy needs two tensors of the same size and dtype");
    }
    to->copy_(*from, /*non_blocking=*/true);
  });
}

} // extern "C"
