// How a product q k^T becomes a probability, and how a row's sum becomes its results.
#ifndef JAXOPS_OPS_ATTENTION_SCORES_CUH_
#define JAXOPS_OPS_ATTENTION_SCORES_CUH_

#include <cstdint>

#include "ops/attention/fragments.cuh"
#include "ops/attention/masks.cuh"
#include "ops/attention/problem.h"

namespace jaxops::attention {

// A maximum beyond which lse is kept in two parts, in units of log 2. Up to here their sum is off by 2^-14 at most.
inline constexpr float kHugeMaximum = 1024;

// A row's results from its maximum score, in units of log 2, its sum of exp2(score - maximum), and its sink.
struct RowResult {
  float inverse, lse;      // inverse: the factor for the summed products; 0 if the row sees nothing
  float maximum, log_sum;  // lse's parts, in units of log 2

  __device__ RowResult(float largest, float sum, float sink) {
    const float most = fmaxf(largest, sink);
    maximum = most == -kInfinity ? 0 : most;
    const float share = Exp2(largest - maximum), total = sum * share + Exp2(sink - maximum);
    inverse = sum == 0 ? 0 : __fdividef(share, total);
    log_sum = total == 0 ? 0 : __log2f(total);  // to 2 ulp, or 2^-21
    lse = total == 0 ? -kInfinity : (maximum + log_sum) * kLn2;
  }
  // row: its number in [batches, heads, queries]; seeing: false if the row is beyond the queries' length.
  __device__ void Store(const Problem& p, int64_t row, bool seeing) const {
    p.lse[row] = seeing ? lse : -kInfinity;
    if (!p.maximum) return;
    const bool is_huge = fabsf(maximum) > kHugeMaximum;
    p.maximum[row] = is_huge ? maximum : maximum + log_sum;
    p.log_sum[row] = is_huge ? log_sum : 0;
  }
};

// The online softmax for a warpgroup's rows; each thread has parts of two rows.
struct RowState {
  float maximum[2], sum[2], rescale[2];  // sum: over this thread's columns

  __device__ void Clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = -kInfinity, sum[h] = 0;
  }
  // Turns scores into exp2(scores factor - maximum). kFirst: the tile's first block.
  // Tried on an H200: an eighth of the exponentials as polynomials, on the FMA units, made forward calls up to 10 %
  // slower, a quarter up to 14 %. Rescaling only once a maximum has grown by 8 made them up to 4 % slower.
  template <bool kFirst, int kCount>
  __device__ __forceinline__ void Update(float (&scores)[kCount], float factor) {
    constexpr int kPairs = kCount / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float even = scores[2 * h], odd = scores[2 * h + 1];
#pragma unroll
      for (int i = 1; i < kPairs; ++i) {
        even = fmaxf(even, scores[4 * i + 2 * h]);
        odd = fmaxf(odd, scores[4 * i + 2 * h + 1]);
      }
      float largest = OverRow(fmaxf(even, odd), [](float a, float b) { return fmaxf(a, b); });
      if (!kFirst) largest = fmaxf(largest, maximum[h]);
      const float offset = Offset(largest, factor);
      if (!kFirst) rescale[h] = Exp2(maximum[h] * factor - offset);
      maximum[h] = largest;
      float even_sum = 0, odd_sum = 0;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float &first = scores[4 * i + 2 * h], &second = scores[4 * i + 2 * h + 1];
        first = Exp2(fmaf(first, factor, -offset));
        second = Exp2(fmaf(second, factor, -offset));
        even_sum += first;
        odd_sum += second;
      }
      sum[h] = kFirst ? even_sum + odd_sum : sum[h] * rescale[h] + even_sum + odd_sum;
    }
  }
  // The subtrahend; 0 in a row that has seen nothing yet, so that its exponentials are 0, not NaN.
  static __device__ float Offset(float maximum, float factor) { return maximum == -kInfinity ? 0 : maximum * factor; }
};

// tanh(x) to 2^-21 absolutely.
__device__ __forceinline__ float Tanh(float x) { return 1 - __fdividef(2, 1 + Exp2(x * (2 * kLog2E))); }

// A score, in units of log 2, plus a bias. Biases below -2.36e38 hide a key, as -inf does.
template <class T>
__device__ __forceinline__ float AddBias(float score, T bias) {
  return fmaf(static_cast<float>(bias), kLog2E, score);
}

// Where shared memory holds the part of a bias or a mask that belongs to the scores; 0: it is read from global memory.
struct ExtraTile {
  uint32_t bias, mask;

  __device__ ExtraTile(Fetched fetched, uint32_t address)
      : bias(fetched == Fetched::kBias ? address : 0), mask(fetched == Fetched::kMask ? address : 0) {}
};

// The slower path, for a soft cap, a bias, a mask or segments: 64 rows by kKeys keys; this thread has two rows. Scores
// come out in units of log 2.
template <class T, int kKeys>
struct GeneralScores {
  const Problem& p;
  KeyRange range;
  int batch;
  Rows heads, queries;
  Compared compared;

  __device__ GeneralScores(const Problem& p, const KeyRange& range, int batch, Rows heads, Rows queries,
                           const Compared& compared)
      : p(p), range(range), batch(batch), heads(heads), queries(queries), compared(compared) {}

  // key: this thread's first. masked: the range or segments hide some keys. extra: for the 64 rows.
  __device__ __forceinline__ void Finish(float (&scores)[kKeys / 2], int key, bool masked,
                                         const ExtraTile& extra = {Fetched::kNothing, 0}) const {
    if (p.soft_cap != 0) {
      const float factor = p.scale / p.soft_cap, cap = p.soft_cap * kLog2E;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] = cap * Tanh(scores[i] * factor);
    } else {
      const float factor = p.scale * kLog2E;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] *= factor;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (extra.bias) {
      const uint32_t line = extra.bias + (warp * 16 + lane / 4) * hopper::kBoxRowBytes + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t two = LoadShared<uint32_t>(line + i / 8 * kChunk<64> + h * 8 * hopper::kBoxRowBytes +
                                                    ((i % 8) ^ (lane / 4)) * 16);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& score = scores[4 * i + 2 * h + j];
            score = AddBias(score, Element<T>(two, j));
          }
        }
    } else if (p.bias.data) {
      const auto add = [](float& score, auto value) { score = AddBias(score, value); };
      if (p.wide_bias) {
        Visit<float>(p.bias, scores, key, add);
      } else {
        Visit<T>(p.bias, scores, key, add);
      }
    }
    if (compared.mask && extra.mask) {
      const uint32_t line = extra.mask + (warp * 16 + lane / 4) * hopper::kBoxRowBytes + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t two =
              LoadShared<uint16_t>(line + h * 8 * hopper::kBoxRowBytes + ((i / 2) ^ (lane / 4)) * 16 + i % 2 * 8);
          if (!(two & 1)) scores[4 * i + 2 * h] = -kInfinity;
          if (!(two & 256)) scores[4 * i + 2 * h + 1] = -kInfinity;
        }
    } else if (compared.mask) {
      Visit<uint8_t>(p.mask, scores, key, [](float& score, uint8_t seen) { score = seen & 1 ? score : -kInfinity; });
    }
    if (!masked) return;
    Band::MaskKeys<kKeys>(scores, range, key);
    if (!compared.segments) return;
    const int32_t* const keys = p.key_segments + int64_t{batch} * p.keys;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int segment = p.query_segments[int64_t{batch} * p.queries + min(queries[h], p.queries - 1)];
#pragma unroll
      for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[4 * i + 2 * h + j];
          if (keys[min(key + 8 * i + j, p.keys - 1)] != segment) score = -kInfinity;
        }
    }
  }

  // Turns the probabilities' gradients into gradients for the scores before the soft cap, or for the bias. lse, in
  // units of log 2, and delta: for this thread's rows.
  __device__ __forceinline__ void Differentiate(float (&scores)[kKeys / 2], float (&dscores)[kKeys / 2],
                                                const float (&lse)[2], const float (&delta)[2], int key,
                                                bool masked) const {
    const bool capped = p.soft_cap != 0;
    const float factor = p.scale / p.soft_cap, offset[2] = {capped ? 0 : delta[0], capped ? 0 : delta[1]};
    if (capped) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const float bounded = Tanh(scores[i] * factor);
        dscores[i] = (dscores[i] - delta[i / 2 % 2]) * (1 - bounded * bounded);
      }
    }
    BiasGradient(scores, dscores, lse, offset, key, masked);
  }
  __device__ __forceinline__ void BiasGradient(float (&scores)[kKeys / 2], float (&dscores)[kKeys / 2],
                                               const float (&lse)[2], const float (&delta)[2], int key, bool masked,
                                               const ExtraTile& extra = {Fetched::kNothing, 0}) const {
    Finish(scores, key, masked, extra);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) scores[i] -= lse[i / 2 % 2];
    if (p.maximum && fmaxf(fabsf(lse[0]), fabsf(lse[1])) > kHugeMaximum) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (fabsf(lse[h]) <= kHugeMaximum) continue;
        const int64_t row = (int64_t{batch} * p.heads + heads[h]) * p.queries + min(queries[h], p.queries - 1);
        const float log_sum = p.log_sum[row];
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) scores[i / 2 * 4 + 2 * h + i % 2] -= log_sum;
      }
    }
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      // Hidden elements are 0, whatever the values are.
      const float probability = lse[i / 2 % 2] == kInfinity ? 0 : Exp2(scores[i]);
      dscores[i] = probability == 0 ? 0 : probability * (dscores[i] - delta[i / 2 % 2]);
    }
  }

 private:
  // Calls use(score, element of `from`) for each score; rows with an even number of elements are read in pairs.
  template <class U, class Use>
  __device__ __forceinline__ void Visit(const Broadcast& from, float (&scores)[kKeys / 2], int key,
                                        const Use& use) const {
    using Two = Pack<U, 2>;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const U* const line =
          static_cast<const U*>(from.data) + from.Row(batch, heads[h], min(queries[h], p.queries - 1));
      if (p.keys % 2 == 0) {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
          const int at = key + 8 * i;
          const Two two = *reinterpret_cast<const Two*>(line + (at < p.keys ? at : 0));
          use(scores[4 * i + 2 * h], two.Get(0));
          use(scores[4 * i + 2 * h + 1], two.Get(1));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) use(scores[4 * i + 2 * h + j], line[min(key + 8 * i + j, p.keys - 1)]);
      }
    }
  }
};

// As above, for the backward pass, transposed: 64 keys by kQueries queries; this thread has the keys `key` and key + 8.
template <class T, int kQueries>
struct GeneralGradients {
  const Problem& p;
  const Reach& reach;
  const Band band;
  int batch, head, key;

  __device__ GeneralGradients(const Problem& p, const Reach& reach, const Band& band, int batch, int head, int key)
      : p(p), reach(reach), band(band), batch(batch), head(head), key(key) {}

  // Turns scores into probabilities and their gradients into gradients for the scores, and rounds both. query: this
  // thread's first; lse, delta: the queries' addresses; masked, extra: as in GeneralScores, for all queries.
  __device__ __forceinline__ void Finish(float (&scores)[kQueries / 2], float (&dscores)[kQueries / 2],
                                         uint32_t (&rounded)[kQueries / 4], uint32_t (&drounded)[kQueries / 4],
                                         int query, uint32_t lse, uint32_t delta, bool masked,
                                         const ExtraTile& extra) const {
    const Masks masks = MasksOf(query, masked);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float *const s = scores + part * kPart, *const ds = dscores + part * kPart;
      Subtract(ds, delta, part);
      if (p.soft_cap != 0) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) ds[i] *= Derivative(s[i]);
      }
      ToProbabilities(s, part, query, lse, masks, extra);
#pragma unroll
      for (int i = 0; i < kPart; ++i) ds[i] = s[i] == 0 ? 0 : s[i] * ds[i];  // hidden scores: 0, even if ds is NaN
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) {
        rounded[part * (kPart / 2) + i] = RoundPair<T>(s[2 * i], s[2 * i + 1]);
        drounded[part * (kPart / 2) + i] = RoundPair<T>(ds[2 * i], ds[2 * i + 1]);
      }
    }
  }
  // The rounded probabilities; their products with the soft cap's derivative replace the scores.
  __device__ __forceinline__ void Probabilities(float (&scores)[kQueries / 2], uint32_t (&rounded)[kQueries / 4],
                                                int query, uint32_t lse, bool masked) const {
    const Masks masks = MasksOf(query, masked);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float* const s = scores + part * kPart;
      float derivative[kPart];
      if (p.soft_cap != 0) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) derivative[i] = Derivative(s[i]);
      }
      ToProbabilities(s, part, query, lse, masks, {Fetched::kNothing, 0});
#pragma unroll
      for (int i = 0; i < kPart / 2; ++i) rounded[part * (kPart / 2) + i] = RoundPair<T>(s[2 * i], s[2 * i + 1]);
      if (p.soft_cap != 0) {
#pragma unroll
        for (int i = 0; i < kPart; ++i) s[i] *= derivative[i];
      }
    }
  }

 private:
  // Scores go in groups of this size, pass by pass: loads between branches would wait for each other, and loads for all
  // scores at once would not find registers.
  static constexpr int kPart = 16, kParts = kQueries / 2 / kPart;

  struct Masks {
    bool ranges, mask, segments;
    int first[2], last[2], own_segments[2];  // for this thread's keys
  };
  __device__ __forceinline__ Masks MasksOf(int query, bool masked) const {
    const Compared compared(p, reach);
    Masks masks = {masked, compared.mask, masked && compared.segments, {}, {}, {}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (masked) {
        band.RangeSeeing(key + 8 * h, query, p, reach, reach.Line(batch, head), &masks.first[h], &masks.last[h]);
        masks.last[h] = min(masks.last[h], band.queries - 1 - query);
      }
      if (masks.segments)
        masks.own_segments[h] = p.key_segments[int64_t{batch} * p.keys + min(key + 8 * h, p.keys - 1)];
    }
    return masks;
  }
  // A part's score i belongs to the thread's query QueryOf(part, i).
  static __device__ __forceinline__ int QueryOf(int part, int i) { return part * (kPart * 2) + i / 4 * 8 + i % 2; }
  // Subtracts the queries' numbers at an address from a part's scores; the largest size of a number.
  static __device__ __forceinline__ float Subtract(float* scores, uint32_t row, int part) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {  // two queries and two keys
      const float2 two = LoadShared<float2>(row + QueryOf(part, i) * 4);
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[i + e] -= e % 2 ? two.y : two.x;
      largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    return largest;
  }
  // The soft cap's part.
  __device__ __forceinline__ float Derivative(float score) const {
    const float bounded = Tanh(score * (p.scale / p.soft_cap));
    return 1 - bounded * bounded;
  }
  __device__ __forceinline__ void ToProbabilities(float* scores, int part, int query, uint32_t lse, const Masks& masks,
                                                  const ExtraTile& extra) const {
    if (p.soft_cap != 0) {
      const float factor = p.scale / p.soft_cap, cap = p.soft_cap * kLog2E;
#pragma unroll
      for (int i = 0; i < kPart; ++i) scores[i] = cap * Tanh(scores[i] * factor);
    } else {
      const float factor = p.scale * kLog2E;
#pragma unroll
      for (int i = 0; i < kPart; ++i) scores[i] *= factor;
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (extra.bias) {
      // 8 queries by 8 keys: from two times 8 queries, the pairs with `key` and with key + 8. The chunk is this
      // warpgroup's.
      const int eight = 2 * warp + lane / 8 % 2;
      const uint32_t line = extra.bias + (lane / 16 * 8 + lane % 8) * hopper::kBoxRowBytes + (eight ^ (lane % 8)) * 16;
#pragma unroll
      for (int pair = 0; pair < kPart / 8; ++pair) {
        uint32_t blocks[4];
        LoadTransposed(blocks, line + (part * (kPart * 2) + pair * 16) * hopper::kBoxRowBytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& score = scores[pair * 8 + i];
          score = AddBias(score, Element<T>(blocks[i / 2], i % 2));
        }
      }
    } else if (p.bias.data) {
      const auto add = [](float& score, auto value) { score = AddBias(score, value); };
      if (p.wide_bias) {
        Visit<float>(p.bias, scores, part, query, add);
      } else {
        Visit<T>(p.bias, scores, part, query, add);
      }
    }
    if (masks.mask && extra.mask) {
      const uint32_t line = extra.mask + lane / 4;
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        const int row = QueryOf(part, i) + lane % 4 * 2;  // the warp's 16 keys are one piece
        const int piece = (threadIdx.x / kWarpgroup - 1) * 4 + warp;
        const uint8_t seen =
            LoadShared<uint8_t>(line + row * hopper::kBoxRowBytes + (piece ^ (row % 8)) * 16 + i / 2 % 2 * 8);
        if (!(seen & 1)) scores[i] = -kInfinity;
      }
    } else if (masks.mask) {
      Visit<uint8_t>(p.mask, scores, part, query,
                     [](float& score, uint8_t seen) { score = seen & 1 ? score : -kInfinity; });
    }
    if (masks.ranges) {
#pragma unroll
      for (int i = 0; i < kPart; ++i)
        if (QueryOf(part, i) < masks.first[i / 2 % 2] || QueryOf(part, i) > masks.last[i / 2 % 2])
          scores[i] = -kInfinity;
    }
    if (masks.segments) {
      const int32_t* const queries = p.query_segments + int64_t{batch} * p.queries;
#pragma unroll
      for (int i = 0; i < kPart; ++i)
        if (queries[min(query + QueryOf(part, i), p.queries - 1)] != masks.own_segments[i / 2 % 2])
          scores[i] = -kInfinity;
    }
    if (Subtract(scores, lse, part) > kHugeMaximum && p.maximum) {
      const float* const log_sums = p.log_sum + (int64_t{batch} * p.heads + head) * p.queries;
#pragma unroll
      for (int i = 0; i < kPart; ++i)
        if (fabsf(LoadShared<float>(lse + QueryOf(part, i) * 4)) > kHugeMaximum)
          scores[i] -= log_sums[min(query + QueryOf(part, i), p.queries - 1)];
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) scores[i] = Exp2(scores[i]);
  }
  // Calls use(score, element of `from`) for each score in a part.
  template <class U, class Use>
  __device__ __forceinline__ void Visit(const Broadcast& from, float* scores, int part, int query,
                                        const Use& use) const {
    const int first = min(key, p.keys - 1), second = min(key + 8, p.keys - 1) - first;
    const U* const line = static_cast<const U*>(from.data) + from.Row(batch, head, 0) + first;
    U values[kPart];
#pragma unroll
    for (int i = 0; i < kPart; ++i)
      values[i] = line[min(query + QueryOf(part, i), p.queries - 1) * from.query_stride + (i / 2 % 2 ? second : 0)];
#pragma unroll
    for (int i = 0; i < kPart; ++i) use(scores[i], values[i]);
  }
};

}  // namespace jaxops::attention

#endif  // JAXOPS_OPS_ATTENTION_SCORES_CUH_
