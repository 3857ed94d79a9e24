// Threads that share the independent parts of one call. With one thread, nothing is started.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

namespace headway {

class Pool {
 public:
  // Never destroyed: at exit its threads may still be asleep in it. A forked process, which has
  // none of the threads, gets a pool of its own.
  static Pool& shared() {
    static std::mutex guard;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    const std::lock_guard<std::mutex> lock(guard);
    if (owner != getpid()) {
      pool = new Pool;
      owner = getpid();
    }
    return *pool;
  }

  // work(0) ... work(tasks - 1), each once, on up to `threads` threads, the caller among them.
  void run(int tasks, int threads, const std::function<void(int)>& work) {
    const std::lock_guard<std::mutex> one_call_at_a_time(calls_);
    const int wanted = (threads < tasks ? threads : tasks) - 1;
    const int helpers = wanted < kMostHelpers ? wanted : kMostHelpers;
    while (int(threads_.size()) < helpers) {
      const int number = int(threads_.size());
      threads_.emplace_back([this, number] { serve(number); });
    }
    work_ = &work;
    tasks_ = tasks;
    next_ = 0;
    busy_ = helpers;
    bool sleepers;
    {
      const std::lock_guard<std::mutex> lock(state_);
      ticket_.store((ticket_ / kCall + 1) * kCall + helpers, std::memory_order_release);
      sleepers = asleep_ > 0;
    }
    if (sleepers) start_.notify_all();
    take_tasks(work, tasks);
    if (spin([this] { return busy_ == 0; })) return;
    std::unique_lock<std::mutex> lock(state_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  static constexpr uint64_t kCall = 256;
  static constexpr int kMostHelpers = int(kCall) - 1;
  // A layer's calls follow each other within this, and waking a thread would take as long as many
  // of them; between steps the helpers sleep.
  static constexpr auto kPatience = std::chrono::microseconds(100);

  // Whether `ready` came true soon.
  template <typename Ready>
  static bool spin(const Ready& ready) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    do {
      for (int i = 0; i < 32; ++i) {
        if (ready()) return true;
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    } while (std::chrono::steady_clock::now() < deadline);
    return false;
  }

  void take_tasks(const std::function<void(int)>& work, int tasks) {
    for (int task = next_++; task < tasks; task = next_++) work(task);
  }

  void serve(int number) {
    uint64_t seen = 0;
    const auto called = [&] { return ticket_.load(std::memory_order_acquire) != seen; };
    for (;;) {
      if (!spin(called)) {
        std::unique_lock<std::mutex> lock(state_);
        ++asleep_;
        start_.wait(lock, called);
        --asleep_;
      }
      seen = ticket_.load(std::memory_order_acquire);
      // The call goes on until its helpers are done, so what it left for them stays.
      if (number >= int(seen % kCall)) continue;
      take_tasks(*work_, tasks_);
      if (--busy_ == 0) {
        const std::lock_guard<std::mutex> lock(state_);
        done_.notify_one();
      }
    }
  }

  std::mutex calls_, state_;
  std::condition_variable start_, done_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<int> next_{0}, busy_{0};
  // Number of the call, times kCall, plus how many helpers take part.
  std::atomic<uint64_t> ticket_{0};
  int tasks_ = 0, asleep_ = 0;
};

// The same without a pool where there is nothing to share.
template <typename Work>
void in_parallel(int tasks, int threads, const Work& work) {
  if (threads > 1 && tasks > 1) {
    Pool::shared().run(tasks, threads, work);
    return;
  }
  for (int task = 0; task < tasks; ++task) work(task);
}

// Rows [begin, end) in as many shares as there are threads, if they are work enough to share.
template <typename Work>
void rows_in_parallel(int rows, int64_t elements_per_row, int threads, const Work& work) {
  constexpr int64_t kWorthIt = 16384;  // elements per thread: some microseconds
  int64_t shares = rows * elements_per_row / kWorthIt;
  if (shares > threads) shares = threads;
  if (shares > rows) shares = rows;
  if (shares <= 1) return work(0, rows);
  in_parallel(int(shares), threads, [&](int share) {
    work(int(int64_t(rows) * share / shares), int(int64_t(rows) * (share + 1) / shares));
  });
}

}  // namespace headway
