// Row operations of a drafter's step in f32 on the CPU, in one memory pass where plain operations need three to seven.
// Each runs on the calling thread: threads share a step by blocks, not by operations.
//
// Uses nothing of libtorch; row_kernels.rs passes addresses that it has checked.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// Compiles for several register widths; the loader chooses the widest that the processor has.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST
#endif
#define INLINE __attribute__((always_inline)) static inline

namespace {

// Rows per float partial sum of a column, which is then added to a double: rounding grows with the number of rows.
constexpr int64_t kSum = 64;

// e^x to 2 ulp by Cody and Waite's reduction and Cephes' polynomial; 0 below the normal range of f32.
INLINE float exp_f32(float x) {
  const float within = x < 88.0f ? (x > -87.0f ? x : -87.0f) : (x == x ? 88.0f : x);
  const float n = std::nearbyintf(within * 1.44269504088896341f);
  const float r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float fraction = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -87.0f ? 0.0f : fraction * scale;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// Largest of a row's scores and `largest`.
INLINE float largest_of(const float* scores, int64_t width, float largest) {
#pragma omp simd reduction(max : largest)
  for (int64_t k = 0; k < width; ++k) largest = scores[k] > largest ? scores[k] : largest;
  return largest;
}

}  // namespace

extern "C" {

// Matrix of contiguous rows: row (i, j) begins at i * outer_stride + j * inner_stride.
struct Rows {
  float* data;
  int64_t outer, inner, outer_stride, inner_stride;
};

WIDEST void draftmill_rms_norm(const Rows* x, const float* weight, int64_t width, double eps, float* y, float* scale) {
  for (int64_t i = 0; i < x->outer; ++i) {
    for (int64_t j = 0; j < x->inner; ++j) {
      const float* row = x->data + i * x->outer_stride + j * x->inner_stride;
      float square = 0.0f;
#pragma omp simd reduction(+ : square)
      for (int64_t k = 0; k < width; ++k) square += row[k] * row[k];
      const float r = static_cast<float>(1.0 / std::sqrt(square / static_cast<double>(width) + eps));
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) y[k] = row[k] * r * weight[k];
      *scale++ = r;
      y += width;
    }
  }
}

// RMS norm from known scales.
WIDEST void draftmill_rms_norm_from_scale(const Rows* x, const float* scale, const float* weight, int64_t width, float* y) {
  for (int64_t i = 0; i < x->outer; ++i) {
    for (int64_t j = 0; j < x->inner; ++j, y += width) {
      const float* row = x->data + i * x->outer_stride + j * x->inner_stride;
      const float r = *scale++;
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) y[k] = row[k] * r * weight[k];
    }
  }
}

WIDEST void draftmill_rms_norm_backward(
    const float* dy, const Rows* x, const float* scale, const float* weight, int64_t width, const Rows* dx, float* dw) {
  std::vector<double> sums(width, 0.0);
  std::vector<float> few(width, 0.0f);
  float* part = few.data();
  int64_t taken = 0;
  for (int64_t i = 0; i < x->outer; ++i) {
    for (int64_t j = 0; j < x->inner; ++j) {
      const float* row = x->data + i * x->outer_stride + j * x->inner_stride;
      float* out = dx->data + i * dx->outer_stride + j * dx->inner_stride;
      const float r = *scale++;
      float along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (int64_t k = 0; k < width; ++k) {
        const float product = dy[k] * (row[k] * r);
        part[k] += product;
        along += product * weight[k];
      }
      const float mean = along / static_cast<float>(width) * r;
#pragma omp simd
      for (int64_t k = 0; k < width; ++k) out[k] = (dy[k] * weight[k] - row[k] * mean) * r;
      dy += width;
      if (++taken % kSum == 0) {
        for (int64_t k = 0; k < width; ++k) sums[k] += part[k], part[k] = 0.0f;
      }
    }
  }
  for (int64_t k = 0; k < width; ++k) dw[k] = static_cast<float>(sums[k] + part[k]);
}

// `gate_up` holds gate and up of each row, `width` each.
WIDEST void draftmill_swiglu(const Rows* gate_up, int64_t width, float* out) {
  for (int64_t i = 0; i < gate_up->outer; ++i, out += width) {
    const float* gate = gate_up->data + i * gate_up->outer_stride;
    const float* up = gate + width;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) out[k] = gate[k] * sigmoid(gate[k]) * up[k];
  }
}

// Recomputes `out`, and computes the gradient of gate and up from that of `out`.
WIDEST void draftmill_swiglu_backward(
    const float* d_out, const Rows* gate_up, int64_t width, float* out, float* d_gate_up) {
  for (int64_t i = 0; i < gate_up->outer; ++i, out += width, d_out += width, d_gate_up += 2 * width) {
    const float* gate = gate_up->data + i * gate_up->outer_stride;
    const float* up = gate + width;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) {
      const float open = sigmoid(gate[k]);
      const float opened = gate[k] * open;
      out[k] = opened * up[k];
      d_gate_up[width + k] = d_out[k] * opened;
      d_gate_up[k] = d_out[k] * up[k] * (open + opened * (1.0f - open));
    }
  }
}

// Online softmax step per row: the running maximum grows, scores become exp(score - maximum), and the running sum is
// multiplied by `rescale` and adds them.
WIDEST void draftmill_online_softmax(
    float* scores, int64_t rows, int64_t width, float* max, float* sum, float* rescale) {
  for (int64_t i = 0; i < rows; ++i, scores += width) {
    const float largest = largest_of(scores, width, max[i]);
    float total = 0.0f;
#pragma omp simd reduction(+ : total)
    for (int64_t k = 0; k < width; ++k) {
      scores[k] = exp_f32(scores[k] - largest);
      total += scores[k];
    }
    rescale[i] = exp_f32(max[i] - largest);
    sum[i] = sum[i] * rescale[i] + total;
    max[i] = largest;
  }
}

// Softmax backward per row from a known log-sum: scores become weights exp(score - log_sum), and gradients of weights
// become those of scores, weight * (d_weight - delta).
WIDEST void draftmill_softmax_backward(
    float* scores, float* d_weights, int64_t rows, int64_t width, const float* log_sum, const float* delta) {
  for (int64_t i = 0; i < rows; ++i, scores += width, d_weights += width) {
    const float whole = log_sum[i], mean = delta[i];
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) {
      const float weight = exp_f32(scores[k] - whole);
      d_weights[k] = (d_weights[k] - mean) * weight;
      scores[k] = weight;
    }
  }
}

// Softmax of each row in place, and its negative entropy, sum p ln p.
WIDEST void draftmill_softmax_entropy(float* scores, int64_t rows, int64_t width, float* entropy) {
  for (int64_t i = 0; i < rows; ++i, scores += width) {
    const float largest = largest_of(scores, width, -INFINITY);
    float total = 0.0f, weighted = 0.0f;
#pragma omp simd reduction(+ : total, weighted)
    for (int64_t k = 0; k < width; ++k) {
      const float below = scores[k] - largest;
      const float e = exp_f32(below);
      total += e;
      weighted += e > 0.0f ? e * below : 0.0f;
      scores[k] = e;
    }
    const float inverse = 1.0f / total;
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) scores[k] *= inverse;
    entropy[i] = weighted * inverse - std::log(total);
  }
}

// Statistics of the softmax q of each row against a teacher's probabilities p, row index[i] of `teacher`. Scores become q.
// For each row: largest score; ln sum exp(score - largest); sum p (score - largest); sum min(p, q); sum of q where q < p.
WIDEST void draftmill_compare_rows(
    float* scores, const float* teacher, const int64_t* index, int64_t rows, int64_t width, float* max, float* log_total,
    float* cross, float* shared, float* under) {
  for (int64_t i = 0; i < rows; ++i, scores += width) {
    const float* p = teacher + index[i] * width;
    const float largest = largest_of(scores, width, -INFINITY);
    float total = 0.0f, weighted = 0.0f;
#pragma omp simd reduction(+ : total, weighted)
    for (int64_t k = 0; k < width; ++k) {
      const float below = scores[k] - largest;
      const float e = exp_f32(below);
      total += e;
      weighted += p[k] > 0.0f ? p[k] * below : 0.0f;
      scores[k] = e;
    }
    const float inverse = 1.0f / total;
    float smaller = 0.0f, lower = 0.0f;
#pragma omp simd reduction(+ : smaller, lower)
    for (int64_t k = 0; k < width; ++k) {
      const float q = scores[k] * inverse;
      const bool less = q < p[k];
      smaller += less ? q : p[k];
      lower += less ? q : 0.0f;
      scores[k] = q;
    }
    max[i] = largest;
    log_total[i] = std::log(total);
    cross[i] = weighted;
    shared[i] = smaller;
    under[i] = lower;
  }
}

// q becomes q (own - [q < p] below) - against p, with the numbers of each row.
WIDEST void draftmill_slope_rows(
    float* q, const float* teacher, const int64_t* index, int64_t rows, int64_t width, const float* own,
    const float* below, const float* against) {
  for (int64_t i = 0; i < rows; ++i, q += width) {
    const float* p = teacher + index[i] * width;
    const float all = own[i], less = below[i], minus = against[i];
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) {
      const float factor = q[k] < p[k] ? all - less : all;
      q[k] = q[k] * factor - minus * p[k];
    }
  }
}

}  // extern "C"
