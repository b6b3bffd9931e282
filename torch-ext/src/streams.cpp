// Queues of work on a GPU, marks in them, memory that a GPU copies to and from by itself, and copies that nobody waits for.
//
// The type of device is CUDA throughout; which GPU, a number says. No CUDA header: libtorch's own table of devices does it.
//
// An event's calls go to its GPU and back to that of the thread, which on a fresh thread is the first one, whoever uses it; that alone would
// take memory there, or fail. So the thread is brought to the event's GPU by a guard that knows better how to come back.

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
    throw Unsuitable("there is no CUDA device " + std::to_string(gpu) + " in this process");
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

// One of a pool, which libtorch never gives back.
int draftmill_stream_new(int32_t gpu, DraftmillStream* stream) noexcept {
  return guarded([&] { *stream = packed(gpus().getStreamFromGlobalPool(device(gpu))); });
}

// From now on this thread's work for that GPU goes there; `before` says where it went.
int draftmill_stream_enter(const DraftmillStream* stream, DraftmillStream* before) noexcept {
  return guarded([&] { *before = packed(gpus().exchangeStream(unpacked(*stream))); });
}

int draftmill_stream_wait(const DraftmillStream* stream, const c10::Event* event) noexcept {
  return guarded([&] {
    const c10::DeviceGuard there(device(stream->gpu));
    event->block(unpacked(*stream));
  });
}

// The allocator then gives the tensor's memory away no earlier than what is in this stream now is done.
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

int draftmill_event_passed(const c10::Event* event, bool* passed) noexcept {
  return guarded([&] {
    const c10::DeviceGuard there(event->device());
    *passed = event->query();
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
    // Before the guard goes.
    *dropped = c10::Event(c10::kCUDA);
  });
}

int draftmill_pinned(int64_t bytes, at::Tensor** memory) noexcept {
  return guarded([&] {
    const auto options = at::TensorOptions(at::kByte).pinned_memory(true);
    *memory = std::make_unique<at::Tensor>(at::empty({bytes}, options)).release();
  });
}

// In this thread's stream; the host goes on at once where its side is pinned.
int draftmill_copy(const at::Tensor* to, const at::Tensor* from) noexcept {
  return guarded([&] {
    if (to->sizes() != from->sizes() || to->scalar_type() != from->scalar_type()) {
      throw Unsuitable("a copy that nobody waits for takes two tensors of one size and kind");
    }
    to->copy_(*from, /*non_blocking=*/true);
  });
}

} // extern "C"
