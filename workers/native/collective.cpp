// What the ranks of a group exchange within a step, through memory that they all map.
//
// Operation number k of a rank: write into buffer k % 2 of its own two, then post k; read what the
// others have posted for k. A rank that has posted k has done with everything before, so buffer
// k % 2 is free again as soon as everybody has posted k - 1. Sums are taken in rank order, so that
// all ranks hold the same bits.

#include <atomic>
#include <chrono>
#include <ctime>

#include <sched.h>

namespace headway {

// One cache line per rank: nobody's progress slows another's down.
struct alignas(64) Post {
  std::atomic<uint64_t> sequence;
};

struct alignas(64) Board {
  std::atomic<uint32_t> given_up;
};

// A rank's view. memory: a Board, a Post per rank, then two buffers of `capacity` bytes per rank.
struct Group {
  uint8_t* memory;
  int64_t capacity;  // a multiple of 64
  uint64_t sequence;
  int64_t patience_us;
  int32_t rank, size;

  Board& board() const { return *reinterpret_cast<Board*>(memory); }
  Post& post(int r) const { return reinterpret_cast<Post*>(memory + sizeof(Board))[r]; }
  uint8_t* buffer(int r, uint64_t number) const {
    const int64_t at = int64_t(sizeof(Board)) + size * int64_t(sizeof(Post));
    return memory + at + (2 * r + int64_t(number & 1)) * capacity;
  }
};

constexpr int kOk = 0, kGivenUp = -1;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until rank r has posted `number`. Spins while the other is likely at work on another core, then
// lets others have this one, then sleeps: the rank that is waited for may need the core.
inline int wait_for(const Group& group, int r, uint64_t number) {
  constexpr int kSpins = 4000, kYields = 200;
  const std::atomic<uint64_t>& theirs = group.post(r).sequence;
  for (int i = 0; i < kSpins; ++i) {
    if (theirs.load(std::memory_order_acquire) >= number) return kOk;
    relax();
  }
  // Time in which this process itself did not run (stopped, frozen) says nothing about others.
  typedef std::chrono::steady_clock Clock;
  const auto most_per_nap = std::chrono::milliseconds(10);
  Clock::duration waited{};
  auto before = Clock::now();
  for (int i = 0;; ++i) {
    if (theirs.load(std::memory_order_acquire) >= number) return kOk;
    if (group.board().given_up.load(std::memory_order_relaxed)) return kGivenUp;
    if (i < kYields) {
      sched_yield();
    } else {
      if (waited > std::chrono::microseconds(group.patience_us)) return r + 1;
      const timespec nap = {0, 20000};
      nanosleep(&nap, nullptr);
    }
    const auto now = Clock::now();
    waited += now - before < most_per_nap ? now - before : Clock::duration(most_per_nap);
    before = now;
  }
}

inline int wait_for_all(const Group& group, uint64_t number) {
  for (int r = 0; r < group.size; ++r)
    if (const int problem = wait_for(group, r, number)) return problem;
  return kOk;
}

// Begins the next operation: this rank's buffer, free to be written.
inline int begin(Group& group, uint8_t** mine) {
  const uint64_t number = group.sequence + 1;
  if (const int problem = wait_for_all(group, number - 1)) return problem;
  if (group.board().given_up.load(std::memory_order_relaxed)) return kGivenUp;
  group.sequence = number;
  *mine = group.buffer(group.rank, number);
  return kOk;
}

inline void publish(const Group& group) {
  group.post(group.rank).sequence.store(group.sequence, std::memory_order_release);
}

// to[i] = parts[0][i] + parts[1][i] + ..., in fp32.
template <typename T>
inline void sum_in_order(const T* const* parts, int size, int64_t count, T* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats total = load(parts[0] + i);
    for (int r = 1; r < size; ++r) total += load(parts[r] + i);
    store(to + i, total);
  }
  if (i == count) return;
  T rest[kLanes] = {};
  Floats total = {};
  for (int r = 0; r < size; ++r) {
    std::memcpy(rest, parts[r] + i, (count - i) * sizeof(T));
    total = r ? total + load(rest) : load(rest);
  }
  store(rest, total);
  std::memcpy(to + i, rest, (count - i) * sizeof(T));
}

template <typename T>
int all_reduce(Group& group, T* x, int64_t count) {
  constexpr int kMaxRanks = 64;
  const T* parts[kMaxRanks];
  const int64_t most = group.capacity / int64_t(sizeof(T));
  for (int64_t at = 0; at < count; at += most) {
    const int64_t here = count - at < most ? count - at : most;
    uint8_t* mine;
    if (const int problem = begin(group, &mine)) return problem;
    std::memcpy(mine, x + at, here * sizeof(T));
    publish(group);
    if (const int problem = wait_for_all(group, group.sequence)) return problem;
    for (int r = 0; r < group.size; ++r)
      parts[r] = reinterpret_cast<const T*>(group.buffer(r, group.sequence));
    sum_in_order(parts, group.size, here, x + at);
  }
  return kOk;
}

// mine: [rows][row_bytes]; on rank 0 `whole` becomes [rows][size][row_bytes].
inline int gather(Group& group, const uint8_t* mine, int64_t rows, int64_t row_bytes,
                  uint8_t* whole) {
  const int64_t bytes = rows * row_bytes;
  for (int64_t at = 0; at < bytes; at += group.capacity) {
    const int64_t here = bytes - at < group.capacity ? bytes - at : group.capacity;
    uint8_t* to;
    if (const int problem = begin(group, &to)) return problem;
    if (group.rank) std::memcpy(to, mine + at, here);
    publish(group);
    if (group.rank) continue;
    for (int r = 0; r < group.size; ++r) {
      if (const int problem = wait_for(group, r, group.sequence)) return problem;
      const uint8_t* from = r ? group.buffer(r, group.sequence) : mine + at;
      for (int64_t done = 0; done < here;) {
        const int64_t row = (at + done) / row_bytes, column = (at + done) % row_bytes;
        const int64_t left = row_bytes - column;
        const int64_t piece = here - done < left ? here - done : left;
        std::memcpy(whole + (row * group.size + r) * row_bytes + column, from + done, piece);
        done += piece;
      }
    }
  }
  return kOk;
}

inline int broadcast(Group& group, uint8_t* x, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += group.capacity) {
    const int64_t here = bytes - at < group.capacity ? bytes - at : group.capacity;
    uint8_t* mine;
    if (const int problem = begin(group, &mine)) return problem;
    if (group.rank == 0) std::memcpy(mine, x + at, here);
    publish(group);
    if (group.rank == 0) continue;
    if (const int problem = wait_for(group, 0, group.sequence)) return problem;
    std::memcpy(x + at, group.buffer(0, group.sequence), here);
  }
  return kOk;
}

}  // namespace headway

using headway::Group;

#define HEADWAY_GROUP_EXPORT __attribute__((visibility("default")))

// Each returns 0, or -1 when the group has been given up, or 1 + the rank that does not answer.
extern "C" {

HEADWAY_GROUP_EXPORT int64_t headway_group_bytes(int32_t size, int64_t capacity) {
  return int64_t(sizeof(headway::Board)) + size * int64_t(sizeof(headway::Post)) +
         2 * size * capacity;
}

HEADWAY_GROUP_EXPORT int headway_group_all_reduce_float32(Group* group, float* x, int64_t count) {
  return headway::all_reduce(*group, x, count);
}

HEADWAY_GROUP_EXPORT int headway_group_all_reduce_bfloat16(Group* group, headway::Bf16* x,
                                                           int64_t count) {
  return headway::all_reduce(*group, x, count);
}

HEADWAY_GROUP_EXPORT int headway_group_gather(Group* group, const uint8_t* mine, int64_t rows,
                                              int64_t row_bytes, uint8_t* whole) {
  return headway::gather(*group, mine, rows, row_bytes, whole);
}

HEADWAY_GROUP_EXPORT int headway_group_broadcast(Group* group, uint8_t* x, int64_t bytes) {
  return headway::broadcast(*group, x, bytes);
}

HEADWAY_GROUP_EXPORT void headway_group_give_up(Group* group) {
  group->board().given_up.store(1);
}
}
