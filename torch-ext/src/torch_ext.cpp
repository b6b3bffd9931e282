// C functions that tch lacks. Includes device-neutral headers only, so that this compiles wherever libtorch does; the
// CUDA half is used if it was loaded.
//
// Each function returns a code; see guard.h for the handling of failures.

#include "guard.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/GradMode.h>
#include <torch/headeronly/version.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

using namespace draftmill;

namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor norm_of(const Tensors& list) {
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(list, 2)), 2).to(at::kDouble);
}

// Checks what the fused kernels assume: on the CPU they read `numel` values from a tensor's first, whatever its size,
// stride and dtype.
void check(const at::Tensor& tensor, const at::Tensor& like, const char* what) {
  const auto refuse = [&](const char* why) {
    throw Unsuitable(std::string("fused AdamW does not support a ") + what + " " + why);
  };
  if (!tensor.defined()) refuse("that is undefined");
  if (tensor.layout() != at::kStrided) refuse("that is sparse");
  if (tensor.scalar_type() != at::kFloat) refuse("that is not f32");
  if (!tensor.is_cpu() && !tensor.is_cuda()) refuse("on a device other than the CPU or a GPU");
  if (tensor.device() != like.device()) refuse("on another device than the first master");
  if (!tensor.is_contiguous()) refuse("that is not contiguous");
}

void same_size(const at::Tensor& tensor, const at::Tensor& master, const char* what) {
  if (tensor.sizes() != master.sizes()) {
    throw Unsuitable(std::string("fused AdamW does not support a ") + what + " of another size than its master");
  }
}

// Allocator of GPU `index`, initialised.
c10::DeviceAllocator& allocator(int index) {
  auto& context = at::globalContext();
  if (!context.hasCUDA()) {
    throw Unsuitable("this process has no CUDA device, so no GPU memory");
  }
  if (index < 0 || index >= at::accelerator::deviceCount()) {
    throw Unsuitable("CUDA device " + std::to_string(index) + " does not exist in this process");
  }
  // Before the first use of CUDA, its allocator knows no device.
  context.lazyInitDevice(c10::kCUDA);
  return *c10::getDeviceAllocator(c10::kCUDA);
}

// The same numbers as in attend.rs, which chooses the kernel.
enum Kernel : int { kCpu = 0, kFlash = 1, kEfficient = 2 };

// Checks what the kernels assume: size, dtype and a step of one within a row.
void check_attention(const at::Tensor& x, at::IntArrayRef size, const at::Tensor& queries, at::ScalarType kind, const char* what) {
  const auto refuse = [](const std::string& why) { throw Unsuitable(std::string("attention does not support ") + why); };
  if (!x.defined()) refuse(std::string("undefined ") + what);
  if (x.layout() != at::kStrided) refuse(std::string("sparse ") + what);
  if (x.device() != queries.device()) refuse(what + std::string(" on another device than the queries"));
  if (x.scalar_type() != kind) refuse(what + std::string(" of another dtype than the queries require"));
  if (x.sizes() != size) refuse(what + std::string(" of another size than the queries require"));
  if (x.stride(-1) != 1) refuse(what + std::string(" that are not contiguous in their last dimension"));
}

void check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (!q.defined() || q.dim() != 3 || !k.defined() || k.dim() != 3) {
    throw Unsuitable("attention requires queries and keys of three dimensions");
  }
  if (q.numel() == 0 || k.numel() == 0) throw Unsuitable("attention does not support empty queries or keys");
  const std::array<int64_t, 3> seen = {q.size(0), k.size(1), q.size(2)};
  check_attention(q, q.sizes(), q, q.scalar_type(), "queries");
  check_attention(k, seen, q, q.scalar_type(), "keys");
  check_attention(v, seen, q, q.scalar_type(), "values");
}

at::ScalarType kind_of_sums(const at::Tensor& q) {
  return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// `[heads, length, ...]` as a batch of `heads` with one head each. The backward of the efficient kernel expects the
// output as `[batch, length, heads, width]`; with one head both layouts are the same.
at::Tensor one_head(const at::Tensor& x) {
  return x.unsqueeze(1);
}

template <size_t N>
void hand_over(std::array<at::Tensor, N> tensors, at::Tensor** out) {
  std::array<std::unique_ptr<at::Tensor>, N> owned;
  for (size_t i = 0; i < N; ++i) owned[i] = std::make_unique<at::Tensor>(std::move(tensors[i]));
  for (size_t i = 0; i < N; ++i) out[i] = owned[i].release();
}

} // namespace

extern "C" {

struct DraftmillUpdate {
  double learning_rate;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double step;
  double denominator;
  double max_norm;
};

struct DraftmillMemory {
  uint64_t allocated;
  uint64_t reserved;
  uint64_t peak;
  uint64_t free;
  uint64_t total;
};

struct DraftmillAttention {
  bool flash;
  bool efficient;
  bool math;
  bool cudnn;
};

// Error text of this thread's last call; empty after success.
const char* draftmill_last_error() noexcept {
  return slot;
}

const char* draftmill_version() noexcept {
  return TORCH_VERSION;
}

int draftmill_fused_adamw(
    at::Tensor* const* masters,
    at::Tensor* const* gradients,
    at::Tensor* const* exp_avg,
    at::Tensor* const* exp_avg_sq,
    size_t count,
    const at::Tensor* norm,
    const DraftmillUpdate* update) noexcept {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    const double denominator = update->denominator;
    if (!std::isfinite(denominator) || denominator <= 0) {
      throw Unsuitable("fused AdamW requires a denominator that is a finite number above zero");
    }
    Tensors m, g, a, s;
    for (size_t i = 0; i < count; ++i) {
      const at::Tensor &master = *masters[i], &gradient = *gradients[i];
      check(master, *masters[0], "master");
      check(*exp_avg[i], *masters[0], "first moment");
      check(*exp_avg_sq[i], *masters[0], "second moment");
      // A gradient is overwritten anyway, so a copy of it serves as well.
      const at::Tensor dense = gradient.defined() && gradient.layout() == at::kStrided ? gradient.contiguous() : gradient;
      check(dense, *masters[0], "gradient");
      same_size(*exp_avg[i], master, "first moment");
      same_size(*exp_avg_sq[i], master, "second moment");
      same_size(dense, master, "gradient");
      // The CUDA kernel rejects lists that end with an empty tensor.
      if (master.numel() == 0) continue;
      m.push_back(master);
      g.push_back(dense);
      a.push_back(*exp_avg[i]);
      s.push_back(*exp_avg_sq[i]);
    }
    if (m.empty()) return;
    if (!norm->defined() || norm->dim() != 0 || norm->scalar_type() != at::kDouble || norm->device() != m[0].device()) {
      throw Unsuitable("fused AdamW requires a norm that is a single f64 on the device of the masters");
    }
    // The kernels only read the step and the divisor, from their device, so all tensors share one of each. Both are
    // computed there, so that the host need not wait for the norm.
    const auto options = m[0].options().requires_grad(false);
    const auto number = [&](double value) { return at::full({}, value, options.dtype(at::kDouble)); };
    // Divide by a tensor: for a host scalar a GPU multiplies by its reciprocal.
    const at::Tensor mean = number(denominator);
    const at::Tensor clip = number(update->max_norm).div(norm->div(mean).add(1e-6)).clamp_max(1.0);
    const at::Tensor divisor = mean.div(clip).to(at::kFloat);
    const at::Tensor unfit = divisor.isfinite().logical_not().to(at::kFloat);
    const Tensors steps(m.size(), at::full({}, update->step, options));
    at::_fused_adamw_(
        m, g, a, s, {}, steps, update->learning_rate, update->beta1, update->beta2, update->weight_decay, update->eps,
        /*amsgrad=*/false, /*maximize=*/false, divisor, unfit);
  });
}

// Returns one f64 on the device of the tensors without waiting.
int draftmill_norm(at::Tensor* const* tensors, size_t count, at::Tensor** norm) noexcept {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    Tensors list;
    for (size_t i = 0; i < count; ++i) list.push_back(*tensors[i]);
    hand_over<1>({list.empty() ? at::zeros({}, at::kDouble) : norm_of(list)}, norm);
  });
}

// Calls `work` for each number on one of the threads of a CPU operation. A tensor iterator does so without linking
// OpenMP here, whose runtime must be libtorch's own. Operations inside detect the parallel region and stay on their
// thread.
int draftmill_parallel_for(int64_t count, void (*work)(void*, int64_t), void* context) noexcept {
  return guarded([&] {
    const at::Tensor numbers = at::arange(count, at::kLong);
    auto iterator = at::TensorIterator::borrowing_nullary_op(numbers);
    iterator.for_each(
        [&](char** data, const int64_t* strides, int64_t size) {
          for (int64_t i = 0; i < size; ++i) {
            work(context, *reinterpret_cast<const int64_t*>(data[0] + i * strides[0]));
          }
        },
        1);
  });
}

int draftmill_empty_cache(int index) noexcept {
  return guarded([&] { allocator(index).emptyCache(); });
}

int draftmill_memory(int index, DraftmillMemory* memory) noexcept {
  return guarded([&] {
    auto& device = allocator(index);
    const auto at = static_cast<c10::DeviceIndex>(index);
    const auto stats = device.getDeviceStats(at);
    const auto [free, total] = device.getMemoryInfo(at);
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto &allocated = stats.allocated_bytes[all], &reserved = stats.reserved_bytes[all];
    *memory = {
        static_cast<uint64_t>(allocated.current),
        static_cast<uint64_t>(reserved.current),
        static_cast<uint64_t>(allocated.peak),
        free,
        total,
    };
  });
}

int draftmill_expand_segments(bool expand) noexcept {
  return guarded([&] {
    c10::CachingAllocator::setAllocatorSettings(expand ? "expandable_segments:True" : "expandable_segments:False");
  });
}

int draftmill_segments_expand(bool* expand) noexcept {
  return guarded([&] { *expand = c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments(); });
}

int draftmill_allow_tf32(bool allow) noexcept {
  return guarded([&] {
    auto& context = at::globalContext();
    context.setAllowTF32CuBLAS(allow);
    context.setAllowTF32CuDNN(allow);
  });
}

int draftmill_tf32_allowed(bool* allowed) noexcept {
  return guarded([&] {
    const auto& context = at::globalContext();
    *allowed = context.allowTF32CuBLAS() || context.allowTF32CuDNN();
  });
}

int draftmill_set_attention(const DraftmillAttention* use) noexcept {
  return guarded([&] {
    auto& context = at::globalContext();
    context.setSDPUseFlash(use->flash);
    context.setSDPUseMemEfficient(use->efficient);
    context.setSDPUseMath(use->math);
    context.setSDPUseCuDNN(use->cudnn);
  });
}

int draftmill_attention(DraftmillAttention* used) noexcept {
  return guarded([&] {
    const auto& context = at::globalContext();
    *used = {
        context.userEnabledFlashSDP(),
        context.userEnabledMemEfficientSDP(),
        context.userEnabledMathSDP(),
        context.userEnabledCuDNNSDP(),
    };
  });
}

// Returns two tensors: the output, and the log-sum of each row.
int draftmill_attend(
    int kernel,
    const at::Tensor* queries,
    const at::Tensor* keys,
    const at::Tensor* values,
    double scale,
    at::Tensor** gathered) noexcept {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    check_inputs(*queries, *keys, *values);
    const at::Tensor q = one_head(*queries), k = one_head(*keys), v = one_head(*values);
    at::Tensor out, log_sum;
    switch (kernel) {
      case kCpu:
        std::tie(out, log_sum) = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0, false, {}, scale);
        break;
      case kFlash: {
        const auto all = at::_scaled_dot_product_flash_attention(q, k, v, 0, false, false, scale);
        out = std::get<0>(all), log_sum = std::get<1>(all);
        break;
      }
      case kEfficient: {
        const auto all = at::_scaled_dot_product_efficient_attention(q, k, v, {}, true, 0, false, scale);
        out = std::get<0>(all), log_sum = std::get<1>(all);
        break;
      }
      default: throw Unsuitable("unknown attention kernel");
    }
    // The efficient kernel pads the log-sums to a multiple of 32.
    hand_over<2>({out.squeeze(1), log_sum.squeeze(1).narrow(1, 0, q.size(2))}, gathered);
  });
}

// Returns three tensors: the gradients of queries, keys and values.
int draftmill_attend_backward(
    int kernel,
    const at::Tensor* d_gathered,
    const at::Tensor* queries,
    const at::Tensor* keys,
    const at::Tensor* values,
    const at::Tensor* gathered,
    const at::Tensor* log_sum,
    double scale,
    at::Tensor** gradients) noexcept {
  return guarded([&] {
    const c10::AutoGradMode no_grad(false);
    check_inputs(*queries, *keys, *values);
    check_attention(*d_gathered, queries->sizes(), *queries, queries->scalar_type(), "gradients");
    check_attention(*gathered, queries->sizes(), *queries, queries->scalar_type(), "outputs");
    const int64_t heads = queries->size(0), length = queries->size(1);
    if (!log_sum->defined() || log_sum->dim() != 2) throw Unsuitable("attention requires log-sums of two dimensions");
    // The kernels assume log-sums with a step of one.
    const at::Tensor sums = log_sum->contiguous();
    check_attention(sums, {heads, length}, *queries, kind_of_sums(*queries), "log-sums");
    const at::Tensor q = one_head(*queries), k = one_head(*keys), v = one_head(*values);
    const at::Tensor d_out = one_head(*d_gathered), out = one_head(*gathered), sum = one_head(sums);
    // State of the random generator, which is unused without dropout.
    const at::Tensor none = at::empty({2}, q.options().dtype(at::kLong));
    at::Tensor dq, dk, dv;
    switch (kernel) {
      case kCpu:
        std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, sum, 0, false, {}, scale);
        break;
      case kFlash:
        std::tie(dq, dk, dv) = at::_scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, sum, {}, {}, length, k.size(2), 0, false, none, none, scale);
        break;
      case kEfficient: {
        // Same layout as in the forward: each head's log-sums start at a multiple of 32, and the padding has zero
        // weight.
        constexpr double kInfinity = std::numeric_limits<double>::infinity();
        const at::Tensor padded = at::full({heads, 1, (length + 31) / 32 * 32}, kInfinity, sum.options());
        padded.narrow(2, 0, length).copy_(sum);
        const auto all = at::_scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, {}, out, padded, none, none, 0, {true, true, true, false}, false, scale);
        dq = std::get<0>(all), dk = std::get<1>(all), dv = std::get<2>(all);
        break;
      }
      default: throw Unsuitable("unknown attention kernel");
    }
    hand_over<3>({dq.squeeze(1), dk.squeeze(1), dv.squeeze(1)}, gradients);
  });
}

// Throws the exception that `what` selects, for tests of error conversion.
int draftmill_throw(int what) noexcept {
  return guarded([&] {
    switch (what) {
      case 0: throw 0;
      case 1: throw std::bad_alloc();
      case 2: throw std::logic_error("a mistake\nin two lines");
      case 3: TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate 1 TiB");
      case 4: TORCH_CHECK(false, "a shape");
      default: at::full({int64_t{1} << 50}, 0, at::TensorOptions(at::kFloat));
    }
  });
}

} // extern "C"
