// Conversion of C++ exceptions to return codes, with the message in a thread-local slot. No exception leaves C++.

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

// Thrown if this library or process cannot do what was requested; nothing was changed.
struct Unsuitable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Not a std::string: storing an out-of-memory message must not allocate.
inline thread_local char slot[1024];

inline int store(Code code, const char* text) noexcept {
  std::snprintf(slot, sizeof slot, "%s", text);
  return code;
}

inline bool is_out_of_memory(const c10::Error& error, const char* text) noexcept {
  // The CPU allocator throws a plain Error.
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
    return store(kUnsuitable, error.what());
  } catch (const c10::Error& error) {
    const char* text = error.what_without_backtrace();
    return store(is_out_of_memory(error, text) ? kOutOfMemory : kFailed, text);
  } catch (const std::bad_alloc& error) {
    return store(kOutOfMemory, error.what());
  } catch (const std::exception& error) {
    return store(kFailed, error.what());
  } catch (...) {
    return store(kFailed, "libtorch threw an exception that is not a std::exception");
  }
}

} // namespace draftmill
