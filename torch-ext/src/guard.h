// How a failure leaves C++: as a code, with its message in a slot of the thread. Nothing is thrown out.

#pragma once

#include <c10/util/Exception.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

namespace draftmill {

// The same numbers as in ffi.rs.
enum Code : int { kDone = 0, kFailed = 1, kOutOfMemory = 2, kUnsuitable = 3 };

// Asked for something that this shim or this process cannot do; nothing was changed.
struct Unsuitable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Not a std::string: to keep a message must not need memory when memory is what lacks.
inline thread_local char slot[1024];

inline int keep(Code code, const char* text) noexcept {
  std::snprintf(slot, sizeof slot, "%s", text);
  return code;
}

inline bool tells_of_memory(const c10::Error& error, const char* text) noexcept {
  // The allocator of the CPU throws a plain Error.
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      std::strstr(text, "DefaultCPUAllocator") != nullptr;
}

template <typename Work>
int guarded(Work&& work) noexcept {
  slot[0] = '\0';
  try {
    work();
    return kDone;
  } catch (const Unsuitable& error) {
    return keep(kUnsuitable, error.what());
  } catch (const c10::Error& error) {
    const char* text = error.what_without_backtrace();
    return keep(tells_of_memory(error, text) ? kOutOfMemory : kFailed, text);
  } catch (const std::bad_alloc& error) {
    return keep(kOutOfMemory, error.what());
  } catch (const std::exception& error) {
    return keep(kFailed, error.what());
  } catch (...) {
    return keep(kFailed, "libtorch threw something that is no std::exception");
  }
}

} // namespace draftmill
