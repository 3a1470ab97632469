// A thread's packs of its rows: which they are, where they lie in each tensor, and how they are read and written.
// docs/adding.md explains pack, held, streamed, staged, shifted and slot.
#ifndef JAXOPS_ROWS_ROW_PACKS_CUH_
#define JAXOPS_ROWS_ROW_PACKS_CUH_

#include <cstdint>
#include <limits>
#include <utility>

#include "rows/exchange.cuh"
#include "rows/geometry.cuh"
#include "rows/pack_access.cuh"

namespace jaxops::rows {

// A pack from any address, for 4-byte words. It is taken from the aligned vectors around it, as far as they hold a word
// in [first, end), counted from the source; other words are 0. An aligned vector that holds a word of an array lies in
// the array's allocation.
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

// kPadded: packs beyond a row's end hold values that do not change the body's results, so they are tested for only when
// they are read and stored. The values are zeros, as in rows beyond the last. Single elements hold values that the body
// masks.
template <class P_, int kPack, Layout kLayout_, class G, bool kPadded_>
class RowPacks {
 public:
  using P = P_;
  using Geometry = G;
  static constexpr int kV = kPack;
  static constexpr bool kPadded = kPadded_;
  static constexpr bool kShifted = kLayout_ == Layout::kShifted;
  static constexpr int kSlots = G::kSlots;
  static constexpr Layout kLayout = kLayout_;
  static constexpr bool kHeld = P::kPacks > 0;
  static constexpr int kRows = P::kAcross ? kV : 1;            // rows per thread
  static constexpr bool kOneRow = !P::kAcross && !P::kInWarp;  // a block has one row
  static constexpr int kHeldPacks = kHeld ? P::kPacks : 1;

  explicit __device__ RowPacks(const G& geometry)
      : geometry_(geometry),
        lane_(LaneOfThread<P>(geometry.team)),
        step_((P::kInWarp || P::kAcross || P::kLanes ? LanesOf<P>(geometry.team) : static_cast<int>(blockDim.x)) *
              (P::kStaged ? 1 : ClusterOf<P>(geometry.team)) * kWide) {
    if constexpr (P::kStaged && P::kClusters) {
      const int share = static_cast<int>(StagedColumns(columns(), geometry.team.cluster));
      lane_ += share * ClusterRank();
      end_ = min(columns(), share * static_cast<int>(ClusterRank() + 1));
    } else if constexpr (P::kClusters) {
      if (ClusterOf<P>(geometry.team) > 1) lane_ += LanesOf<P>(geometry.team) * ClusterRank();
    }
  }

  // Turns to row `first` in a group whose offsets are given; across, to kV rows from there. From `end` on, the last
  // rows are repeated and nothing is stored.
  __device__ void MoveTo(int64_t first, int64_t end, const int64_t (&group)[G::kSlots]) {
    limit_ = std::numeric_limits<int>::max();
    live_ = first < end;
    geometry_.rows.Offsets(live_ ? first : end - kRows, offsets_);
#pragma unroll
    for (int slot = 0; slot < G::kSlots; ++slot) offsets_[slot] += group[slot];
    if constexpr (kShifted) {
      shift_ = static_cast<int>(offsets_[0] % kV);
      readable_ = static_cast<int>(std::min<int64_t>(columns() + kV, geometry_.size - offsets_[0]));
    }
    if constexpr (kLayout != Layout::kGeneral) {
#pragma unroll
      for (int slot = 0; slot < G::kSlots; ++slot) offsets_[slot] += FirstColumn() * ColumnStride(slot);
    }
  }

  // Turns to this thread's team's rows among a block's rows, which begin with `begin`.
  __device__ void MoveToTeam(int64_t begin, int64_t end, const int64_t (&group)[G::kSlots]) {
    MoveTo(begin + Team() * kRows, end, group);
  }
  __device__ int Team() const { return TeamOfThread<P>(geometry_.team); }
  // Rows per block.
  static __host__ __device__ int BlockRows(const rows::Team& team) { return TeamsOf<P>(team) * kRows; }

  __device__ int columns() const { return static_cast<int>(geometry_.columns.total); }
  __device__ bool live() const { return live_; }

  // Leaves out the columns from `limit` on, as far as they fill packs, until the next MoveTo.
  __device__ void Limit(int limit) { limit_ = limit; }

  // Calls fn(pack, column) for the thread's packs, and after() behind each run of at most kRun packs. An unaligned
  // row's first pack begins at the pack boundary before the row, so that all accesses are aligned; its column is
  // negative.
  template <class Fn, class After>
  __device__ void ForEachPack(Fn fn, After after) const {
    const int end = min(this->end(), limit_);
    if constexpr (kPadded) {
#pragma unroll
      for (int pack = 0; pack < kHeldPacks; ++pack) {
        if (LeavesFrom(pack)) break;
        fn(pack, FirstColumn() + pack * step_);
      }
      after();
    } else if constexpr (kHeld) {
      ForEachPackBefore(end, fn);
      after();
    } else if constexpr (P::kBackwards) {
      const int packs = (end - FirstColumn() + step_ - 1) / step_;
#pragma unroll(kUnrolled)
      for (int k = packs - 1; k >= 0; --k) fn(0, FirstColumn() + k * step_);
      after();
    } else {
      for (int begin = FirstColumn(); begin < end; begin += kRun * step_) {
        const int stop = min(end, begin + kRun * step_);
#pragma unroll(kUnrolled)
        for (int column = begin; column < stop; column += step_) fn(0, column);
        after();
      }
    }
  }
  template <class Fn>
  __device__ void ForEachPack(Fn fn) const {
    ForEachPack(fn, [] {});
  }

  // Visits the packs of a held row that are read whatever kPadded is: those before its end and its limit.
  template <class Fn>
  __device__ void ForEachPackRead(Fn fn) const {
    ForEachPackBefore(min(end(), limit_), fn);
  }
  // How many packs of the thread these are; they are its first.
  __device__ int CountRead() const {
    const int columns = min(end(), limit_) - FirstColumn();
    return static_cast<int>((static_cast<unsigned>(max(columns, 0)) + step_ - 1) / step_);
  }

  // Calls fn(columns...) for kFew packs of a streamed row at a time, fn(column) for the packs left over, and after()
  // behind each run.
  template <int kFew, class Fn, class After>
  __device__ void ForEachFewPacks(Fn fn, After after) const {
    static_assert(!kHeld && kRun % kFew == 0);
    const int end = min(this->end(), limit_);
    int column = FirstColumn();
    while (column + (kFew - 1) * step_ < end) {
      for (int k = 0; k < kRun && column + (kFew - 1) * step_ < end; k += kFew) {
        [&]<int... few>(std::integer_sequence<int, few...>) {
          fn(column + few * step_...);
        }(std::make_integer_sequence<int, kFew>());
        column += kFew * step_;
      }
      after();
    }
    for (; column < end; column += step_) fn(column);
    after();
  }

  // Visits the packs that hold columns of the row, whatever kPadded is.
  template <class Fn>
  __device__ void ForEachPackInside(Fn fn) const {
    ForEachPackBefore(end(), fn);
  }

  // Whether all threads' packs from `pack` on lie beyond a padded row's end. Single elements ask this every fourth
  // time. (For staged rows, asking every eighth time took longer.)
  __device__ bool LeavesFrom(int pack) const {
    constexpr int kFew = kV == 1 && !P::kStaged ? 4 : kHeldPacks;
    return pack > 0 && pack % kFew == 0 && pack * step_ >= columns();
  }

  // Where the columns that this block may have end.
  __device__ int end() const { return P::kSegment || (P::kStaged && P::kClusters) ? end_ : columns(); }
  // Whether a pack begins before that end.
  __device__ bool Begins(int pack, int column) const { return pack < P::kSure || column < end(); }

  // Whether a pack's positions all belong to the row.
  __device__ bool Whole(int column) const {
    return !kShifted || static_cast<unsigned>(column) < static_cast<unsigned>(max(columns() - kV + 1, 0));
  }

  // Whether a pack's position i belongs to the row.
  __device__ bool Inside(int column, int i) const {
    return !kShifted || static_cast<unsigned>(column + i) < static_cast<unsigned>(columns());
  }

  // A pack from a tensor in x's shape, with its neighbours' elements where it overlaps the row's edges.
  template <class T>
  __device__ Pack<T, kV> Read(const T* tensor, int pack, int column) const {
    const int64_t offset = Offset(0, pack, column);
    if (!kShifted || column + kV <= readable_) return ReadPack<kV>(tensor + offset);
    Pack<T, kV> values = {};
#pragma unroll
    for (int i = 0; i < kV; ++i)
      if (offset + i < geometry_.size) values.Set(i, tensor[offset + i]);
    return values;
  }
  __device__ Pack<float, kV> Read(const AnyTensor& tensor, int pack, int column) const {
    return ReadAny(tensor, pack, column).Widen(tensor.type);
  }
  // Reads all packs, if rows are held.
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

  // Does the same for all packs, if rows are held. If a row has its own warps, few warps see an edge; then one branch
  // per row suffices.
  template <class T>
  __device__ void ClipEdges(Pack<T, kV> (&packs)[kHeldPacks], T outside) const {
    if constexpr (kShifted) {
      const int end = columns() + shift_;  // counted from the first pack's first element
      const bool at_end = end % kV != 0 && static_cast<uint32_t>(end / kV) % static_cast<uint32_t>(step_ / kV) ==
                                               static_cast<uint32_t>(lane_);
      if (!P::kInWarp && FirstColumn() >= 0 && !at_end) return;
#pragma unroll
      for (int k = 0; k < P::kPacks; ++k) {
        const int column = FirstColumn() + k * step_;
        if (column < columns()) Clip(packs[k], column, outside);
      }
    }
  }

  // A pack from a broadcast operand; its values beyond the row's edges are arbitrary.
  template <int kSlot, class T>
  __device__ Pack<T, kV> ReadBroadcast(const T* data, int pack, int column) const {
    constexpr bool kAdjacent = kLayout == Layout::kPlain && !P::kAcross;  // as the row's own elements are
    const T* const source = data + Offset<kAdjacent>(kSlot, pack, column);
    [[maybe_unused]] const int64_t step = Step(kSlot);
    if constexpr (kShifted && sizeof(T) == 4) {
      if (step == 1) return ReadUnaligned<T, kV>(source, -column, columns() - column);
    }
    if constexpr (kAdjacent) {
      return ReadPack<kV>(source);
    } else {
      if (kLayout == Layout::kPlain && step != 0) return ReadPack<kV>(source);
      Pack<T, kV> values = {};
#pragma unroll
      for (int i = 0; i < kV; ++i)
        values.Set(i, Inside(column, i) ? source[kLayout == Layout::kPlain ? 0 : i * step] : T(0.0f));
      return values;
    }
  }

  // The offset in a layout at which a pack begins. kAdjacent: a row's elements are adjacent in it.
  template <bool kAdjacent = false>
  __device__ int64_t Offset(int slot, int pack, int column) const {
    const int64_t start = offsets_[slot];
    if constexpr (kLayout == Layout::kGeneral) return start + geometry_.ColumnOffset(slot, column);
    // The distance from the thread's first pack is the same for all threads.
    if constexpr (kHeld) {
      const int64_t step = static_cast<int64_t>(static_cast<uint32_t>(step_));
      return start + (kAdjacent ? step : step * ColumnStride(slot)) * pack;
    } else {
      const int64_t distance = column - FirstColumn();
      return start + (kAdjacent ? distance : distance * ColumnStride(slot));
    }
  }
  __device__ int64_t Step(int slot) const { return geometry_.steps[slot]; }

  // The offset in a layout at which the first row's column 0 lies.
  __device__ int64_t Origin(int slot) const { return offsets_[slot] - FirstColumn() * ColumnStride(slot); }

  template <class Target>
  __device__ void Write(const Target& tensor, int pack, int column, const Pack<ElementOf<Target>, kV>& values) const {
    if (!live_ || (kPadded && !Begins(pack, column))) return;
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
    if (!kShifted || column + kV <= readable_) return ReadAnyPack<kV>(tensor + offset);
    return ReadAnyPack<kV>(tensor + offset, static_cast<int>(geometry_.size - offset));
  }

  static constexpr int kRun = 16;
  // How many packs of a streamed row are read at once. A pack that is not plain takes several times as many
  // instructions: unrolled four times, this code would be a third of a kernel's file. Among unaligned rows only the
  // longest are streamed.
  static constexpr int kUnrolled = [] {
    if constexpr (P::kSegment) return P::kFew;
    return kLayout == Layout::kPlain ? 4 : kShifted ? 1 : 2;
  }();
  static constexpr int kWide = P::kAcross ? 1 : kV;  // columns per pack

  // Visits the packs that begin before `to`.
  template <class Fn>
  __device__ void ForEachPackBefore(int to, Fn fn) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int pack = 0; pack < P::kPacks; ++pack) {
        const int column = FirstColumn() + pack * step_;
        if (column < to) fn(pack, column);
      }
    } else {
      for (int column = FirstColumn(); column < to; column += step_) fn(0, column);
    }
  }

  // How many of the row's columns the thread's warp has; the warp has no other rows.
  __device__ int ColumnsOfWarp() const {
    constexpr int kSpan = P::kWarpLanes * kWide;  // columns of the warp's packs, which lie side by side
    int inside = 0;
    const auto add = [&](int column) { inside += max(0, min(column + kSpan, end()) - max(column, 0)); };
    const int first = FirstColumn() - lane_ % P::kWarpLanes * kWide;
    if constexpr (kHeld) {
#pragma unroll
      for (int k = 0; k < P::kPacks; ++k) add(first + k * step_);
    } else {
      for (int column = first; column < end(); column += step_) add(column);
    }
    return inside;
  }

  __device__ int FirstColumn() const { return lane_ * kWide - (kShifted ? shift_ : 0); }
  __device__ int64_t ColumnStride(int slot) const {
    return slot == 0 && !P::kAcross ? 1 : geometry_.columns.strides[0][slot];
  }

  template <int kSlot>
  __device__ int64_t RowOffset(int r) const {
    return offsets_[kSlot] + (P::kAcross ? r * geometry_.steps[kSlot] : 0);
  }

  const std::conditional_t<G::kCopied, G, const G&> geometry_;
  int lane_;     // the thread's first pack, among the row's
  int step_;     // columns from one of a thread's packs to its next
  int end_ = 0;  // see end()
  int64_t offsets_[G::kSlots];
  // For unaligned rows: the columns in their first pack that come before the row; and where the tensor ends, counted
  // from column 0, if that lies within a row's last pack.
  int shift_, readable_;
  bool live_;
  int limit_ = std::numeric_limits<int>::max();
};

}  // namespace jaxops::rows

#endif  // JAXOPS_ROWS_ROW_PACKS_CUH_
