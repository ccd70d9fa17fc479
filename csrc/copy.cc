// Copying payload into the arena.
//
// Promises: as fast as one memcpy for small buffers, and for large ones limited by the memory, not
// by one core: a pool of threads that is made on the first large copy and lives as long as the
// process, and stores that bypass the cache (the payload is read by another process, later). A fork
// child has no pool threads of its own; it makes a new pool.
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "store.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shmrl {
namespace {

constexpr std::size_t kPoolBytesMin = 8u << 20;  // below, waking a thread costs more than it saves
constexpr std::size_t kPieceBytes = 2u << 20;    // what a thread takes at a time
constexpr std::size_t kStreamBytesMin = 16u << 20;  // above half a last-level cache
// Also smaller copies bypass the cache when their destination is not in it: a plain store would
// first read the line from memory. Cycling through 1.5 GiB in pieces of 384 KiB: 15 µs instead
// of 24.
constexpr std::size_t kColdBytesMin = 128u << 10;
constexpr std::uint64_t kCacheBytes = 8u
                                      << 20;  // written since: beyond this it is not there any more
constexpr std::size_t kRecentMax = 16;
constexpr unsigned kThreadsMax = 4;

#if defined(__x86_64__)
// Non-temporal stores: no read of the destination line, no eviction of what the caller works on.
void stream_copy(std::byte* to, const std::byte* from, std::size_t size) noexcept {
  std::size_t const head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
  if (size < 4096) {
    std::memcpy(to, from, size);
    return;
  }
  std::memcpy(to, from, head);
  to += head;
  from += head;
  size -= head;
  for (; size >= 64; size -= 64, to += 64, from += 64) {
    auto const* source = reinterpret_cast<const __m128i*>(from);
    auto* destination = reinterpret_cast<__m128i*>(to);
    _mm_prefetch(reinterpret_cast<const char*>(from) + 512, _MM_HINT_NTA);
    __m128i const a = _mm_loadu_si128(source);
    __m128i const b = _mm_loadu_si128(source + 1);
    __m128i const c = _mm_loadu_si128(source + 2);
    __m128i const d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(destination, a);
    _mm_stream_si128(destination + 1, b);
    _mm_stream_si128(destination + 2, c);
    _mm_stream_si128(destination + 3, d);
  }
  _mm_sfence();  // the seal that follows publishes them
  std::memcpy(to, from, size);
}
#else
void stream_copy(std::byte* to, const std::byte* from, std::size_t size) noexcept {
  std::memcpy(to, from, size);
}
#endif

void copy_piece(std::byte* to, const std::byte* from, std::size_t size, bool stream) noexcept {
  if (stream)
    stream_copy(to, from, size);
  else
    std::memcpy(to, from, size);
}

// Where this thread has copied to lately. A block that is freed and put again (the allocator is
// last in, first out) is still in the cache, and then plain stores are faster than streaming ones.
class Recent {
 public:
  // Whether `to` is probably cached; remembers it.
  bool hot(const std::byte* to, std::size_t size) noexcept {
    written_ += size;
    for (Entry& entry : entries_) {
      if (entry.to != to) continue;
      bool const near = written_ - entry.at <= kCacheBytes + size;
      entry.at = written_;
      return near;
    }
    entries_[next_++ % kRecentMax] = {to, written_};
    return false;
  }

 private:
  struct Entry {
    const std::byte* to;
    std::uint64_t at;
  };
  Entry entries_[kRecentMax] = {};
  std::uint64_t written_ = 0;
  std::size_t next_ = 0;
};

bool should_stream(const std::byte* to, std::size_t size) noexcept {
  static thread_local Recent recent;
  if (size >= kStreamBytesMin) return true;
  return size >= kColdBytesMin && !recent.hot(to, size);
}

// One copy at a time uses the pool; a second caller meanwhile copies alone.
class Pool {
 public:
  static Pool& instance() {
    static Pool* pool = nullptr;
    static std::mutex* guard = new std::mutex;
    static bool const registered = ::pthread_atfork([] { guard->lock(); }, [] { guard->unlock(); },
                                                    [] {
                                                      // The parent's threads are not here; leave
                                                      // its pool alone.
                                                      pool = nullptr;
                                                      new (guard) std::mutex;
                                                    }) == 0;
    (void)registered;
    std::scoped_lock const lock(*guard);
    if (pool == nullptr) pool = new Pool;  // never destroyed: its threads wait for ever
    return *pool;
  }

  // False if another copy has the pool.
  bool copy(std::byte* to, const std::byte* from, std::size_t size, unsigned threads, bool stream) {
    std::unique_lock one(busy_, std::try_to_lock);
    if (!one.owns_lock()) return false;
    unsigned const helpers = grow(threads - 1);
    if (helpers == 0) return false;
    {
      std::scoped_lock const lock(mutex_);
      to_ = to;
      from_ = from;
      size_ = size;
      stream_ = stream;
      next_.store(0, std::memory_order_relaxed);  // published by the mutex
      wanted_ = helpers;
      ++round_;
    }
    wake_.notify_all();
    work();
    std::unique_lock lock(mutex_);
    wanted_ = 0;  // whoever has not begun need not: on a busy machine that may be a time slice away
    done_.wait(lock, [this] { return running_ == 0; });
    return true;
  }

 private:
  // As many helpers as could be started, at most `wanted`.
  unsigned grow(unsigned wanted) {
    while (threads_ < wanted) {
      try {
        std::thread([this, number = threads_] { run(number); }).detach();
      } catch (const std::system_error&) {
        break;  // a limit on threads: go on with what there is
      }
      ++threads_;
    }
    return std::min(threads_, wanted);
  }

  void run(unsigned number) {
    std::uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return round_ != seen && number < wanted_; });
        seen = round_;
        ++running_;
      }
      work();
      std::scoped_lock const lock(mutex_);
      if (--running_ == 0) done_.notify_one();
    }
  }

  void work() noexcept {
    for (;;) {
      // Relaxed: only the claim matters; the data is ordered by the mutex at the end.
      std::size_t const at = next_.fetch_add(kPieceBytes, std::memory_order_relaxed);
      if (at >= size_) return;
      copy_piece(to_ + at, from_ + at, std::min(kPieceBytes, size_ - at), stream_);
    }
  }

  std::mutex busy_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::uint64_t round_ = 0;
  unsigned threads_ = 0, wanted_ = 0, running_ = 0;
  std::byte* to_ = nullptr;
  const std::byte* from_ = nullptr;
  std::size_t size_ = 0;
  bool stream_ = false;
  std::atomic<std::size_t> next_{0};
};

}  // namespace

void copy_in(void* destination, const void* source, std::size_t size, unsigned threads) noexcept {
  auto* const to = static_cast<std::byte*>(destination);
  auto const* const from = static_cast<const std::byte*>(source);
  if (size == 0) return;
  bool const stream = should_stream(to, size);
  if (size >= kPoolBytesMin) {
    // Once: the C library opens a file in /sys for each answer (8 µs).
    static unsigned const cores = std::clamp(std::thread::hardware_concurrency(), 1u, kThreadsMax);
    if (threads == 0) threads = cores;
    threads = std::min(threads, kThreadsMax);
    if (threads > 1 && Pool::instance().copy(to, from, size, threads, stream)) return;
  }
  copy_piece(to, from, size, stream);
}

}  // namespace shmrl
