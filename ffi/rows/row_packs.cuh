// The packs of rows that a thread works on: which they are, where they lie in
// each tensor, and how they are read and written.
#ifndef JAXOPS_ROWS_ROW_PACKS_CUH_
#define JAXOPS_ROWS_ROW_PACKS_CUH_

#include <cstdint>
#include <limits>
#include <utility>

#include "rows/exchange.cuh"
#include "rows/geometry.cuh"
#include "rows/pack_access.cuh"

namespace jaxops::rows {

// A pack from any address, for words of 4 bytes: out of the aligned vectors
// around them, as far as they hold one of the words [first, end), counted from
// the source; zeros elsewhere. An aligned vector that holds a word of an array
// lies in its allocation.
template <class T, int N>
__device__ Pack<T, N> ReadUnaligned(const T* source, int first, int end) {
  static_assert(sizeof(T) == 4 && N % 4 == 0);
  const int behind = static_cast<int>(reinterpret_cast<uintptr_t>(source) / 4 % 4);
  Pack<T, 4> around[N / 4 + 1] = {};
#pragma unroll
  for (int v = 0; v <= N / 4; ++v) {
    const int word = 4 * v - behind;
    if (word + 3 >= first && word < end) around[v] = ReadPack<4>(source + word);
  }
  T words[N + 3];
#pragma unroll
  for (int i = 0; i < N + 3; ++i)
    words[i] = behind & 1 ? around[(i + 1) / 4].lane[(i + 1) % 4] : around[i / 4].lane[i % 4];
  Pack<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) out.lane[i] = behind & 2 ? words[i + 2] : words[i];
  if (first > 0 || end < N) {
#pragma unroll
    for (int i = 0; i < N; ++i) out.lane[i] = i >= first && i < end ? out.lane[i] : 0;
  }
  return out;
}

// kPadded: packs beyond a row's end hold what leaves the body's results alone,
// so that they are not tested for but where they are read and stored: zeros,
// as rows beyond the last are, or, of single elements, what the body masks.
template <class P_, int kPack, Lay kLay_, class G, bool kPadded_>
class RowPacks {
 public:
  using P = P_;
  using Geometry = G;
  static constexpr int kV = kPack;
  static constexpr bool kPadded = kPadded_;
  static constexpr bool kShifted = kLay_ == Lay::kShifted;
  static constexpr int kSlots = G::kSlots;
  static constexpr Lay kLay = kLay_;
  static constexpr bool kHeld = P::kPacks > 0;
  static constexpr int kRows = P::kAcross ? kV : P::kRows;   // that a thread works on
  static constexpr int kStarts = P::kAcross ? 1 : P::kRows;  // places where its packs begin
  static constexpr int kBlockRows = P::kTeams * (P::kAcross ? kV : P::kRows);
  static constexpr int kPerRow = kHeld ? P::kPacks : 1;
  static constexpr int kHeldPacks = kStarts * kPerRow;
  static_assert((kHeld && (kV > 1 || !kPadded)) || P::kRows == 1);

  explicit __device__ RowPacks(const G& geometry) : geometry_(geometry), lane_(LaneOfThread<P>()) {
    if constexpr (P::kStaged && P::kCluster > 1) {
      const int share = StagedColumns<P>(columns());
      lane_ += share * ClusterRank();
      end_ = min(columns(), share * static_cast<int>(ClusterRank() + 1));
    } else if constexpr (P::kCluster > 1) {
      lane_ += P::kLanes * ClusterRank();
    }
  }

  // Turns to the rows first, first + every, ... of a group whose offsets are
  // given; across, to kV rows from `first`. From `end` on the last rows are
  // repeated, and nothing is stored.
  __device__ void MoveTo(int64_t first, int64_t every, int64_t end, const int64_t (&group)[G::kSlots]) {
    limit_ = std::numeric_limits<int>::max();
#pragma unroll
    for (int s = 0; s < kStarts; ++s) {
      const int64_t wanted = first + s * every;
      live_[s] = wanted < end;
      geometry_.rows.Offsets(live_[s] ? wanted : end - (P::kAcross ? kV : 1), offsets_[s]);
#pragma unroll
      for (int slot = 0; slot < G::kSlots; ++slot) offsets_[s][slot] += group[slot];
      if constexpr (kShifted) {
        shift_[s] = static_cast<int>(offsets_[s][0] % kV);
        readable_[s] = static_cast<int>(std::min<int64_t>(columns() + kV, geometry_.size - offsets_[s][0]));
      }
      if constexpr (kLay != Lay::kGeneral) {
#pragma unroll
        for (int slot = 0; slot < G::kSlots; ++slot) offsets_[s][slot] += FirstColumn(s) * ColumnStride(slot);
      }
    }
  }

  // Turns to the rows of this thread's team among [begin, begin + kBlockRows).
  __device__ void MoveToTeam(int64_t begin, int64_t end, const int64_t (&group)[G::kSlots]) {
    MoveTo(begin + Team() * (P::kAcross ? kV : 1), P::kTeams, end, group);
  }
  static __device__ int Team() { return TeamOfThread<P>(); }

  __device__ int columns() const { return static_cast<int>(geometry_.columns.total); }
  __device__ bool live(int pack) const { return live_[pack / kPerRow]; }

  // Leaves out the columns from `limit` on, as far as they fill packs, until
  // the next MoveTo.
  __device__ void Limit(int limit) { limit_ = limit; }

  // Calls fn(pack, column) for the thread's packs, and after() behind each run
  // of at most kRun of them. An unaligned row's first pack begins at the pack
  // boundary before the row, so that all accesses are aligned: its column is
  // negative.
  template <class Fn, class After>
  __device__ void ForEachPack(Fn fn, After after) const {
    const int end = min(this->end(), limit_);
    if constexpr (kPadded) {
#pragma unroll
      for (int pack = 0; pack < kHeldPacks; ++pack) {
        if (LeavesFrom(pack)) break;
        fn(pack, FirstColumn(pack / kPerRow) + pack % kPerRow * kColumnStep);
      }
      after();
    } else if constexpr (kHeld) {
      ForEachPackBefore(end, fn);
      after();
    } else if constexpr (P::kBackwards) {
      const int packs = (end - FirstColumn(0) + kColumnStep - 1) / kColumnStep;
#pragma unroll(kUnrolled)
      for (int k = packs - 1; k >= 0; --k) fn(0, FirstColumn(0) + k * kColumnStep);
      after();
    } else {
      for (int begin = FirstColumn(0); begin < end; begin += kRun * kColumnStep) {
        const int stop = min(end, begin + kRun * kColumnStep);
#pragma unroll(kUnrolled)
        for (int column = begin; column < stop; column += kColumnStep) fn(0, column);
        after();
      }
    }
  }
  template <class Fn>
  __device__ void ForEachPack(Fn fn) const {
    ForEachPack(fn, [] {});
  }

  // Of a held row, the packs that are read whatever kPadded: those that begin before its end and its limit.
  template <class Fn>
  __device__ void ForEachPackRead(Fn fn) const {
    ForEachPackBefore(min(end(), limit_), fn);
  }
  // How many of the thread's packs those are: its first.
  __device__ int CountRead() const {
    const int columns = min(end(), limit_) - FirstColumn(0);
    return static_cast<int>((static_cast<unsigned>(max(columns, 0)) + kColumnStep - 1) / kColumnStep);
  }

  // Calls fn(columns...) for kFew packs of a streamed row at a time, fn(column)
  // for those left over, and after() behind each run.
  template <int kFew, class Fn, class After>
  __device__ void ForEachFewPacks(Fn fn, After after) const {
    static_assert(!kHeld && kRun % kFew == 0);
    const int end = min(this->end(), limit_);
    int column = FirstColumn(0);
    while (column + (kFew - 1) * kColumnStep < end) {
      for (int k = 0; k < kRun && column + (kFew - 1) * kColumnStep < end; k += kFew) {
        [&]<int... few>(std::integer_sequence<int, few...>) {
          fn(column + few * kColumnStep...);
        }(std::make_integer_sequence<int, kFew>());
        column += kFew * kColumnStep;
      }
      after();
    }
    for (; column < end; column += kColumnStep) fn(column);
    after();
  }

  // The packs that hold columns of the row, whatever kPadded.
  template <class Fn>
  __device__ void ForEachPackInside(Fn fn) const {
    ForEachPackBefore(end(), fn);
  }

  // Whether a padded row's packs from `pack` on all lie beyond its end, in all threads: asked for every fourth of
  // single elements. (For every eighth of staged rows it took longer.)
  __device__ bool LeavesFrom(int pack) const {
    constexpr int kFew = kV == 1 && !P::kStaged ? 4 : kHeldPacks;
    return pack > 0 && pack % kFew == 0 && pack * kColumnStep >= columns();
  }

  // Where the columns end that this block may have.
  __device__ int end() const { return P::kSplit || (P::kStaged && P::kCluster > 1) ? end_ : columns(); }
  // Whether a pack begins before that.
  __device__ bool Begins(int pack, int column) const { return pack % kPerRow < P::kSure || column < end(); }

  // Whether all positions of a pack belong to the row.
  __device__ bool Whole(int column) const {
    return !kShifted || static_cast<unsigned>(column) < static_cast<unsigned>(max(columns() - kV + 1, 0));
  }

  // Whether position i of a pack belongs to the row.
  __device__ bool Inside(int column, int i) const {
    return !kShifted || static_cast<unsigned>(column + i) < static_cast<unsigned>(columns());
  }

  // A pack of a tensor of x's shape, with its neighbours' elements where it
  // overlaps the row's edges.
  template <class T>
  __device__ Pack<T, kV> Read(const T* tensor, int pack, int column) const {
    const int64_t offset = Offset(0, pack, column);
    if (!kShifted || column + kV <= readable_[pack / kPerRow]) return ReadPack<kV>(tensor + offset);
    Pack<T, kV> values = {};
#pragma unroll
    for (int i = 0; i < kV; ++i)
      if (offset + i < geometry_.size) values.Set(i, tensor[offset + i]);
    return values;
  }
  __device__ Pack<float, kV> Read(const AnyTensor& tensor, int pack, int column) const {
    return ReadAny(tensor, pack, column).Widen(tensor.type);
  }
  // All packs of held rows.
  template <class T>
  __device__ void ReadAll(const T* tensor, Pack<T, kV> (&packs)[kHeldPacks]) const {
    ForEachPackRead([&](int pack, int column) { packs[pack] = Read(tensor, pack, column); });
  }
  __device__ void ReadAll(const AnyTensor& tensor, Pack<float, kV> (&packs)[kHeldPacks]) const {
    AnyPack<kV> read[kHeldPacks] = {};
    ForEachPackRead([&](int pack, int column) { read[pack] = ReadAny(tensor, pack, column); });
    WidenAll(tensor, read, packs);
  }

  // Puts `outside` where a pack overlaps the row's edges.
  template <class T>
  __device__ void Clip(Pack<T, kV>& values, int column, T outside) const {
    if constexpr (kShifted) {
      if (Whole(column)) return;
#pragma unroll
      for (int i = 0; i < kV; ++i)
        if (!Inside(column, i)) values.Set(i, outside);
    }
  }

  // The same for all packs of held rows. Where a row has warps of its own, few of them see an edge: a branch a row.
  template <class T>
  __device__ void ClipEdges(Pack<T, kV> (&packs)[kHeldPacks], T outside) const {
    if constexpr (kShifted) {
#pragma unroll
      for (int s = 0; s < kStarts; ++s) {
        const int end = columns() + shift_[s];  // counted from the first pack's first element
        const bool at_end = end % kV != 0 && end / kV % (P::kLanes * P::kCluster) == lane_;
        if (P::kLanes >= 32 && FirstColumn(s) >= 0 && !at_end) continue;
#pragma unroll
        for (int k = 0; k < P::kPacks; ++k) {
          const int column = FirstColumn(s) + k * kColumnStep;
          if (column < columns()) Clip(packs[s * P::kPacks + k], column, outside);
        }
      }
    }
  }

  // A pack of a broadcast operand; anything beyond the row's edges.
  template <int kSlot, class T>
  __device__ Pack<T, kV> ReadBroadcast(const T* data, int pack, int column) const {
    constexpr bool kAdjacent = kLay == Lay::kPlain && !P::kAcross;  // as the row's own elements are
    const T* const source = data + Offset<kAdjacent>(kSlot, pack, column);
    [[maybe_unused]] const int64_t step = Step(kSlot);
    if constexpr (kShifted && sizeof(T) == 4) {
      if (step == 1) return ReadUnaligned<T, kV>(source, -column, columns() - column);
    }
    if constexpr (kAdjacent) {
      return ReadPack<kV>(source);
    } else {
      if (kLay == Lay::kPlain && step != 0) return ReadPack<kV>(source);
      Pack<T, kV> values = {};
#pragma unroll
      for (int i = 0; i < kV; ++i)
        values.Set(i, Inside(column, i) ? source[kLay == Lay::kPlain ? 0 : i * step] : T(0.0f));
      return values;
    }
  }

  // The offset in a layout of a pack's first element. kAdjacent: those of a row are adjacent in it.
  template <bool kAdjacent = false>
  __device__ int64_t Offset(int slot, int pack, int column) const {
    const int64_t start = offsets_[pack / kPerRow][slot];
    if constexpr (kLay == Lay::kGeneral) return start + geometry_.ColumnOffset(slot, column);
    // The distance from the thread's first pack is the same for all threads: it
    // costs no registers.
    const int distance = kHeld ? pack % kPerRow * kColumnStep : column - FirstColumn(0);
    return start + (kAdjacent ? distance : distance * ColumnStride(slot));
  }
  __device__ int64_t Step(int slot) const { return geometry_.steps[slot]; }

  // The offset in a layout of the first row's column 0.
  __device__ int64_t Origin(int slot) const { return offsets_[0][slot] - FirstColumn(0) * ColumnStride(slot); }

  template <class Target>
  __device__ void Write(const Target& tensor, int pack, int column, const Pack<ElementOf<Target>, kV>& values) const {
    if (!live(pack) || (kPadded && !Begins(pack, column))) return;
    const Target target = tensor + Offset(0, pack, column);
    if (Whole(column)) {
      if constexpr (P::kBackwards && kV > 1) {
        StoreVectorOnce(reinterpret_cast<Pack<ElementOf<Target>, kV>*>(target), values);
      } else {
        WritePack<kHeld || P::kAcross>(target, values);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kV; ++i)
        if (Inside(column, i)) WriteElement(target + i, values.Get(i));
    }
  }

 protected:
  __device__ AnyPack<kV> ReadAny(const AnyTensor& tensor, int pack, int column) const {
    const int64_t offset = Offset(0, pack, column);
    if (!kShifted || column + kV <= readable_[pack / kPerRow]) return ReadAnyPack<kV>(tensor + offset);
    return ReadAnyPack<kV>(tensor + offset, static_cast<int>(geometry_.size - offset));
  }

  static constexpr int kRun = 16;
  // Packs of a streamed row that are read at once. What is not plain takes several times the instructions a pack:
  // unrolled four times it would be a third of a kernel's file. Of unaligned rows the longest alone are streamed.
  static constexpr int kUnrolled = [] {
    if constexpr (P::kSplit) return P::kFew;
    return kLay == Lay::kPlain ? 4 : kShifted ? 1 : 2;
  }();
  static constexpr int kWide = P::kAcross ? 1 : kV;                                       // columns a pack
  static constexpr int kColumnStep = P::kLanes * (P::kStaged ? 1 : P::kCluster) * kWide;  // from a pack to the next

  // For the packs that begin before `to`.
  template <class Fn>
  __device__ void ForEachPackBefore(int to, Fn fn) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < P::kPacks; ++k)
#pragma unroll
        for (int s = 0; s < kStarts; ++s) {
          const int column = FirstColumn(s) + k * kColumnStep;
          if (column < to) fn(s * P::kPacks + k, column);
        }
    } else {
      for (int column = FirstColumn(0); column < to; column += kColumnStep) fn(0, column);
    }
  }

  // How many of the row's columns the thread's warp has: the same for all rows
  // of the thread but where they begin at different places in a pack.
  __device__ int ColumnsOfWarp() const {
    constexpr int kSpan = P::kWarpLanes * kWide;  // of the warp's packs, which lie side by side
    int inside = 0;
    const auto add = [&](int column) { inside += max(0, min(column + kSpan, end()) - max(column, 0)); };
    const int first = FirstColumn(0) - lane_ % P::kWarpLanes * kWide;
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < P::kPacks; ++k) add(first + k * kColumnStep);
    } else {
      for (int column = first; column < end(); column += kColumnStep) add(column);
    }
    return inside;
  }

  __device__ int FirstColumn(int start) const { return lane_ * kWide - (kShifted ? shift_[start] : 0); }
  __device__ int64_t ColumnStride(int slot) const {
    return slot == 0 && !P::kAcross ? 1 : geometry_.columns.strides[0][slot];
  }

  template <int kSlot>
  __device__ int64_t RowOffset(int r) const {
    return P::kAcross ? offsets_[0][kSlot] + r * geometry_.steps[kSlot] : offsets_[r][kSlot];
  }

  const std::conditional_t<G::kCopied, G, const G&> geometry_;
  int lane_;     // of the row's packs, the thread's first
  int end_ = 0;  // see end()
  int64_t offsets_[kStarts][G::kSlots];
  // Of unaligned rows: the columns of their first pack that come before the row, and where the tensor ends, counted
  // from column 0, if that is within a row's last pack.
  int shift_[kStarts], readable_[kStarts];
  bool live_[kStarts];
  int limit_ = std::numeric_limits<int>::max();
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_PACKS_CUH_
