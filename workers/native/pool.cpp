// Threads that share the independent parts of one call. With one thread, nothing is started.

#include <atomic>
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
    const int helpers = (threads < tasks ? threads : tasks) - 1;
    while (int(threads_.size()) < helpers) {
      const int number = int(threads_.size());
      threads_.emplace_back([this, number] { serve(number); });
    }
    {
      const std::lock_guard<std::mutex> lock(state_);
      work_ = &work;
      tasks_ = tasks;
      next_ = 0;
      helpers_ = busy_ = helpers;
      ++call_;
    }
    start_.notify_all();
    take_tasks(work, tasks);
    std::unique_lock<std::mutex> lock(state_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take_tasks(const std::function<void(int)>& work, int tasks) {
    for (int task = next_++; task < tasks; task = next_++) work(task);
  }

  void serve(int number) {
    uint64_t seen = 0;
    for (;;) {
      std::unique_lock<std::mutex> lock(state_);
      start_.wait(lock, [&] { return call_ != seen && number < helpers_; });
      seen = call_;
      const std::function<void(int)>* work = work_;
      const int tasks = tasks_;
      lock.unlock();
      take_tasks(*work, tasks);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex calls_, state_;
  std::condition_variable start_, done_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<int> next_{0};
  int tasks_ = 0, helpers_ = 0, busy_ = 0;
  uint64_t call_ = 0;
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

}  // namespace headway
