#include "block_allocator.h"

#include <algorithm>
#include <bit>
#include <string>

namespace shmrl {
namespace {

constexpr std::uint64_t kGrowBytes = 16ull << 20;  // one reservation; 4 ms at most
constexpr unsigned kFirstFitProbes = 32;

constexpr std::uint32_t granules_of(std::uint64_t size) {
  return static_cast<std::uint32_t>((size + kGranule - 1) / kGranule);
}

constexpr std::uint32_t kind_word(GranuleKind kind, std::uint32_t size_class = 0,
                                  std::uint32_t free_slots = 0) {
  return static_cast<std::uint32_t>(kind) | size_class << 8 | free_slots << 16;
}
GranuleKind kind_of(std::uint32_t word) { return static_cast<GranuleKind>(word & 0xFF); }
std::uint32_t class_in(std::uint32_t word) { return (word >> 8) & 0xFF; }
std::uint32_t free_slots_in(std::uint32_t word) { return word >> 16; }

constexpr std::uint32_t slots_per_slab(std::uint32_t size_class) {
  return static_cast<std::uint32_t>(kSlabBytes / kClassBytes[size_class]);
}

// size in 64-byte units -> class.
constexpr auto kClassOfUnits = [] {
  std::array<std::uint8_t, kSlabObjectMax / 64 + 1> table{};
  std::uint32_t size_class = 0;
  for (std::uint32_t units = 0; units < table.size(); ++units) {
    while (kClassBytes[size_class] < units * 64) ++size_class;
    table[units] = static_cast<std::uint8_t>(size_class);
  }
  return table;
}();
std::uint32_t class_of(std::uint64_t size) { return kClassOfUnits[(size + 63) / 64]; }

// Bins 0..63 hold extents of exactly 1..64 granules, the others quarter octaves.
std::uint32_t bin_of(std::uint32_t length) {
  if (length <= kExactBins) return length - 1;
  unsigned const log = 31u - static_cast<unsigned>(std::countl_zero(length));  // >= 6
  unsigned const quarter = (length >> (log - 2)) & 3u;
  return kExactBins + (log - 6) * 4 + quarter;
}

void bin_push(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t length) {
  Header& h = arena.header();
  std::uint32_t const bin = bin_of(length);
  std::uint32_t const first = h.bins[bin].get();
  Granule& g = arena.granule(head);
  g.previous.set(txn, kNil);
  g.next.set(txn, first);
  if (first != kNil) arena.granule(first).previous.set(txn, head);
  h.bins[bin].set(txn, head);
  h.bin_mask[bin / 64].set(txn, h.bin_mask[bin / 64].get() | 1ull << (bin % 64));
}

void bin_remove(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t length) {
  Header& h = arena.header();
  std::uint32_t const bin = bin_of(length);
  Granule& g = arena.granule(head);
  std::uint32_t const previous = g.previous.get();
  std::uint32_t const next = g.next.get();
  if (next != kNil) arena.granule(next).previous.set(txn, previous);
  if (previous != kNil) {
    arena.granule(previous).next.set(txn, next);
  } else {
    h.bins[bin].set(txn, next);
    if (next == kNil)
      h.bin_mask[bin / 64].set(txn, h.bin_mask[bin / 64].get() & ~(1ull << (bin % 64)));
  }
}

void mark_free(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t length) {
  Granule& first = arena.granule(head);
  first.length.set(txn, length);
  first.kind.set(txn, kind_word(GranuleKind::free_head));
  if (length > 1) {
    Granule& last = arena.granule(head + length - 1);
    last.length.set(txn, length);
    last.kind.set(txn, kind_word(GranuleKind::free_tail));
  }
  bin_push(arena, txn, head, length);
}

void mark_used(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t length) {
  Granule& first = arena.granule(head);
  first.length.set(txn, length);
  first.kind.set(txn, kind_word(GranuleKind::used_head));
  if (length > 1) arena.granule(head + length - 1).kind.set(txn, kind_word(GranuleKind::interior));
}

// First bin at or above `bin` that is not empty, kNil if none.
std::uint32_t next_bin(const Header& h, std::uint32_t bin) {
  for (std::uint32_t word = bin / 64; word < kBinWords; ++word) {
    std::uint64_t mask = h.bin_mask[word].get();
    if (word == bin / 64) mask &= ~0ull << (bin % 64);
    if (mask != 0) {
      std::uint32_t const found = word * 64 + static_cast<std::uint32_t>(std::countr_zero(mask));
      return found < kBins ? found : kNil;
    }
  }
  return kNil;
}

// The highest bin that is not empty, kNil if none.
std::uint32_t last_bin(const Header& h) {
  for (std::uint32_t word = kBinWords; word-- > 0;) {
    std::uint64_t const mask = h.bin_mask[word].get();
    if (mask == 0) continue;
    std::uint32_t const found = word * 64 + 63 - static_cast<std::uint32_t>(std::countl_zero(mask));
    return found < kBins ? found : kNil;
  }
  return kNil;
}

// The first extent of `bin` that holds `length` granules, looking at no more than `probes`.
std::uint32_t find_in_bin(const Arena& arena, std::uint32_t bin, std::uint32_t length,
                          std::uint64_t probes) {
  std::uint32_t at = arena.header().bins[bin].get();
  for (; at != kNil && probes > 0; --probes) {
    Granule& g = arena.granule(at);
    if (g.length.get() >= length) return at;
    at = g.next.get();
  }
  return kNil;
}

std::uint32_t find_extent(const Arena& arena, std::uint32_t length) {
  std::uint32_t const own = bin_of(length);
  std::uint32_t found = find_in_bin(arena, own, length, kFirstFitProbes);
  if (found != kNil) return found;
  std::uint32_t const larger = own + 1 < kBins ? next_bin(arena.header(), own + 1) : kNil;
  if (larger != kNil) return arena.header().bins[larger].get();
  // Nothing larger: look at all of the own bin before saying that there is no room.
  return length > kExactBins ? find_in_bin(arena, own, length, arena.granules_ready()) : kNil;
}

std::uint32_t allocate_extent(Arena& arena, const Txn& txn, std::uint32_t length) {
  std::uint32_t const head = find_extent(arena, length);
  if (head == kNil) return kNil;
  Granule& g = arena.granule(head);
  std::uint32_t const have = g.length.get();
  if (kind_of(g.kind.get()) != GranuleKind::free_head || have < length ||
      head + std::uint64_t{have} > arena.granules_ready())
    throw_corrupt("a free extent", head);
  bin_remove(arena, txn, head, have);
  if (have > length) mark_free(arena, txn, head + length, have - length);
  mark_used(arena, txn, head, length);
  return head;
}

void free_extent(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t length) {
  std::uint64_t const end = std::uint64_t{head} + length;
  if (length == 0 || end > arena.granules_ready()) throw_corrupt("the length of an extent", length);
  if (end < arena.granules_ready()) {
    Granule& after = arena.granule(end);
    if (kind_of(after.kind.get()) == GranuleKind::free_head) {
      std::uint32_t const more = after.length.get();
      if (more == 0 || end + more > arena.granules_ready()) throw_corrupt("a free extent", end);
      bin_remove(arena, txn, static_cast<std::uint32_t>(end), more);
      after.kind.set(txn, kind_word(GranuleKind::interior));
      length += more;
    }
  }
  if (head > 0) {
    Granule& before = arena.granule(head - 1);
    GranuleKind const kind = kind_of(before.kind.get());
    if (kind == GranuleKind::free_tail || kind == GranuleKind::free_head) {
      std::uint32_t const more = before.length.get();
      if (more == 0 || more > head) throw_corrupt("a free extent", head - 1);
      bin_remove(arena, txn, head - more, more);
      before.kind.set(txn, kind_word(GranuleKind::interior));
      arena.granule(head).kind.set(txn, kind_word(GranuleKind::interior));
      head -= more;
      length += more;
    }
  }
  mark_free(arena, txn, head, length);
}

// -- slabs ---------------------------------------------------------------------

void slab_push(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t size_class) {
  Header& h = arena.header();
  std::uint32_t const first = h.slabs[size_class].get();
  Granule& g = arena.granule(head);
  g.previous.set(txn, kNil);
  g.next.set(txn, first);
  if (first != kNil) arena.granule(first).previous.set(txn, head);
  h.slabs[size_class].set(txn, head);
}

void slab_remove(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t size_class) {
  Granule& g = arena.granule(head);
  std::uint32_t const previous = g.previous.get();
  std::uint32_t const next = g.next.get();
  if (next != kNil) arena.granule(next).previous.set(txn, previous);
  if (previous != kNil)
    arena.granule(previous).next.set(txn, next);
  else
    arena.header().slabs[size_class].set(txn, next);
}

void format_slab(Arena& arena, const Txn& txn, std::uint32_t head, std::uint32_t size_class) {
  std::uint32_t const slots = slots_per_slab(size_class);
  for (std::uint32_t i = 0; i < kSlabGranules; ++i) {
    Granule& g = arena.granule(head + i);
    std::uint32_t const below = i * 64;
    std::uint64_t bits = 0;
    if (slots > below) bits = slots - below >= 64 ? ~0ull : (1ull << (slots - below)) - 1;
    g.bits.set(txn, bits);
    g.length.set(txn, i == 0 ? 0 : head);  // head: hint, body: where the head is
    if (i > 0) g.kind.set(txn, kind_word(GranuleKind::slab_body));
  }
  arena.granule(head).kind.set(txn, kind_word(GranuleKind::slab_head, size_class, slots));
}

bool allocate_slot(Arena& arena, const Txn& txn, std::uint32_t size_class, Block& out) {
  Header& h = arena.header();
  std::uint32_t head = h.slabs[size_class].get();
  if (head == kNil) {
    head = allocate_extent(arena, txn, kSlabGranules);
    if (head == kNil) return false;
    format_slab(arena, txn, head, size_class);
    slab_push(arena, txn, head, size_class);
    h.empty_slabs.add(txn, 1);
  }
  Granule& g = arena.granule(head);
  std::uint32_t const word = g.kind.get();
  std::uint32_t const free_slots = free_slots_in(word);
  if (kind_of(word) != GranuleKind::slab_head || class_in(word) != size_class || free_slots == 0)
    throw_corrupt("a slab", head);
  if (free_slots == slots_per_slab(size_class))
    h.empty_slabs.add(txn, static_cast<std::uint64_t>(-1));
  std::uint32_t const hint = g.length.get() % kSlabGranules;  // where the last slot was freed
  for (std::uint32_t n = 0; n < kSlabGranules; ++n) {
    std::uint32_t const i = (hint + n) % kSlabGranules;
    Granule& part = arena.granule(head + i);
    std::uint64_t const bits = part.bits.get();
    if (bits == 0) continue;
    std::uint32_t const bit = static_cast<std::uint32_t>(std::countr_zero(bits));
    part.bits.set(txn, bits & (bits - 1));
    if (n != 0) g.length.set(txn, i);
    g.kind.set(txn, kind_word(GranuleKind::slab_head, size_class, free_slots - 1));
    if (free_slots == 1) slab_remove(arena, txn, head, size_class);
    out.slot = i * 64 + bit;
    out.offset = head * kGranule + out.slot * kClassBytes[size_class];
    return true;
  }
  throw_corrupt("the bitmap of slab", head);
}

void free_slot(Arena& arena, const Txn& txn, std::uint32_t size_class, const Block& block) {
  std::uint64_t const within = block.slot * kClassBytes[size_class];
  if (block.slot >= slots_per_slab(size_class) || block.offset < within ||
      (block.offset - within) % kGranule != 0)
    throw_corrupt("the slab slot of an object", block.slot);
  std::uint32_t const head = static_cast<std::uint32_t>((block.offset - within) / kGranule);
  Granule& g = arena.granule(head);
  std::uint32_t const word = g.kind.get();
  if (kind_of(word) != GranuleKind::slab_head || class_in(word) != size_class)
    throw_corrupt("a slab", head);
  std::uint32_t const i = static_cast<std::uint32_t>(block.slot / 64);
  Granule& part = arena.granule(head + i);
  std::uint64_t const bit = 1ull << (block.slot % 64);
  if ((part.bits.get() & bit) != 0) throw_corrupt("a slab slot freed twice", block.slot);
  part.bits.set(txn, part.bits.get() | bit);
  if (g.length.get() != i) g.length.set(txn, i);
  std::uint32_t const free_slots = free_slots_in(word) + 1;
  g.kind.set(txn, kind_word(GranuleKind::slab_head, size_class, free_slots));
  if (free_slots == 1) slab_push(arena, txn, head, size_class);
  if (free_slots != slots_per_slab(size_class)) return;
  // Empty: keep one per class, so that a put/free pair does not format a slab each time.
  Header& h = arena.header();
  if (h.slabs[size_class].get() == head && g.next.get() == kNil) {
    h.empty_slabs.add(txn, 1);
    return;
  }
  slab_remove(arena, txn, head, size_class);
  free_extent(arena, txn, head, kSlabGranules);
}

std::uint32_t tail_free_granules(const Arena& arena) {
  std::uint64_t const ready = arena.granules_ready();
  if (ready == 0) return 0;
  Granule& last = arena.granule(ready - 1);
  GranuleKind const kind = kind_of(last.kind.get());
  return kind == GranuleKind::free_tail || kind == GranuleKind::free_head ? last.length.get() : 0;
}

}  // namespace

std::uint64_t block_bytes(std::uint64_t size) noexcept {
  return size <= kSlabObjectMax ? kClassBytes[class_of(size)] : granules_of(size) * kGranule;
}

AllocateResult allocate_block(Arena& arena, const Txn& txn, std::uint64_t size, Block& out) {
  bool const small = size <= kSlabObjectMax;
  for (bool trimmed = false;; trimmed = true) {
    if (small) {
      if (allocate_slot(arena, txn, class_of(size), out)) return AllocateResult::ok;
    } else {
      std::uint32_t const head = allocate_extent(arena, txn, granules_of(size));
      if (head != kNil) {
        out = Block{head * kGranule, kNoSlabSlot};
        return AllocateResult::ok;
      }
    }
    if (trimmed || arena.header().empty_slabs.get() == 0) break;
    trim_slabs(arena, txn);
  }
  std::uint64_t const need = small ? kSlabGranules : granules_of(size);
  std::uint64_t const left = arena.granules_limit() - arena.granules_ready();
  return tail_free_granules(arena) + left >= need ? AllocateResult::grow : AllocateResult::full;
}

void free_block(Arena& arena, const Txn& txn, std::uint64_t size, const Block& block) {
  txn.wake_queue();
  if (block.slot != kNoSlabSlot) {
    if (size > kSlabObjectMax) throw_corrupt("the size of a small object", size);
    free_slot(arena, txn, class_of(size), block);
    return;
  }
  std::uint64_t const head = block.offset / kGranule;
  Granule& g = arena.granule(head);
  std::uint32_t const length = granules_of(size);
  if (kind_of(g.kind.get()) != GranuleKind::used_head || g.length.get() != length ||
      block.offset % kGranule != 0)
    throw_corrupt("the extent of an object", head);
  free_extent(arena, txn, static_cast<std::uint32_t>(head), length);
}

void trim_slabs(Arena& arena, const Txn& txn) {
  Header& h = arena.header();
  for (std::uint32_t size_class = 0; size_class < kClasses; ++size_class) {
    std::uint32_t at = h.slabs[size_class].get();
    for (std::uint64_t steps = 0; at != kNil; ++steps) {
      if (steps > arena.granules_ready()) throw_corrupt("the slab list of a class", size_class);
      Granule& g = arena.granule(at);
      std::uint32_t const next = g.next.get();
      if (free_slots_in(g.kind.get()) == slots_per_slab(size_class)) {
        slab_remove(arena, txn, at, size_class);
        free_extent(arena, txn, at, kSlabGranules);
      }
      at = next;
    }
  }
  h.empty_slabs.set(txn, 0);
}

std::uint64_t largest_free_bytes(const Arena& arena) {
  std::uint32_t largest = 0;
  // The longest extent is in the highest bin that is not empty.
  std::uint32_t const top = last_bin(arena.header());
  std::uint32_t at = top == kNil ? kNil : arena.header().bins[top].get();
  for (std::uint64_t steps = 0; at != kNil; ++steps) {
    if (steps > arena.granules_ready()) throw_corrupt("the free list of bin", top);
    largest = std::max(largest, arena.granule(at).length.get());
    at = arena.granule(at).next.get();
  }
  std::uint64_t const beyond =
      arena.granules_limit() - arena.granules_ready() + tail_free_granules(arena);
  return std::max<std::uint64_t>(largest, beyond) * kGranule;
}

Growth plan_growth(const Arena& arena, std::uint64_t size) {
  std::uint64_t const need = size <= kSlabObjectMax ? kSlabGranules : granules_of(size);
  std::uint64_t const from = arena.granules_ready();
  std::uint64_t const tail = tail_free_granules(arena);
  std::uint64_t const least = need > tail ? need - tail : 0;
  std::uint64_t const to = std::min(arena.granules_limit(),
                                    from + std::max<std::uint64_t>(least, kGrowBytes / kGranule));
  return {from, to};
}

void commit_growth(Arena& arena, const Txn& txn, const Growth& growth) {
  Table& payload = arena.header().payload;
  if (payload.ready.get() != growth.from || growth.to <= growth.from) return;
  payload.ready.set(txn, growth.to);
  free_extent(arena, txn, static_cast<std::uint32_t>(growth.from),
              static_cast<std::uint32_t>(growth.to - growth.from));
}

// -- rebuild and audit ---------------------------------------------------------

namespace {

// What the blocks of objects say about a run of granules.
struct Run {
  std::uint32_t head;
  std::uint32_t length;
  std::uint32_t size_class;  // kNil: an extent
  std::uint32_t slot;
  bool operator<(const Run& other) const {
    return head != other.head ? head < other.head : slot < other.slot;
  }
};

// Sorted runs; reports (through `bad`) blocks that cannot be.
template <class Bad>
std::vector<Run> runs_of(const Arena& arena, const std::vector<UsedBlock>& used, Bad bad) {
  std::vector<Run> runs;
  runs.reserve(used.size());
  for (const UsedBlock& u : used) {
    Run run{};
    std::uint64_t start = u.block.offset;
    if (u.block.slot == kNoSlabSlot) {
      run.length = granules_of(u.size);
      run.size_class = kNil;
    } else {
      if (u.size > kSlabObjectMax || u.block.slot >= slots_per_slab(class_of(u.size))) {
        bad("a slab slot out of range", u.block.slot);
        continue;
      }
      run.size_class = class_of(u.size);
      run.slot = static_cast<std::uint32_t>(u.block.slot);
      run.length = kSlabGranules;
      std::uint64_t const within = u.block.slot * kClassBytes[run.size_class];
      if (start < within) {
        bad("an offset before its slab", start);
        continue;
      }
      start -= within;
    }
    if (start % kGranule != 0 || start / kGranule + run.length > arena.granules_ready()) {
      bad("a block outside the payload", u.block.offset);
      continue;
    }
    run.head = static_cast<std::uint32_t>(start / kGranule);
    runs.push_back(run);
  }
  std::sort(runs.begin(), runs.end());
  return runs;
}

}  // namespace

void rebuild_blocks(Arena& arena, const Txn& txn, std::vector<UsedBlock>& used) {
  Header& h = arena.header();
  for (std::uint32_t i = 0; i < kBinWords; ++i) h.bin_mask[i].set(txn, 0);
  for (std::uint32_t i = 0; i < kBins; ++i) h.bins[i].set(txn, kNil);
  for (std::uint32_t i = 0; i <= kClasses; ++i) h.slabs[i].set(txn, kNil);
  h.empty_slabs.set(txn, 0);
  std::vector<Run> const runs = runs_of(
      arena, used, [](const char* what, std::uint64_t value) { throw_corrupt(what, value); });
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < runs.size();) {
    const Run& run = runs[i];
    if (run.head < at) throw_corrupt("two objects overlap at granule", run.head);
    if (run.head > at)
      mark_free(arena, txn, static_cast<std::uint32_t>(at),
                run.head - static_cast<std::uint32_t>(at));
    at = std::uint64_t{run.head} + run.length;
    if (run.size_class == kNil) {
      mark_used(arena, txn, run.head, run.length);
      ++i;
      continue;
    }
    format_slab(arena, txn, run.head, run.size_class);
    std::uint32_t free_slots = slots_per_slab(run.size_class);
    std::uint32_t last = kNil;
    for (; i < runs.size() && runs[i].head == run.head; ++i) {
      if (runs[i].size_class != run.size_class || runs[i].slot == last)
        throw_corrupt("two objects share a slab slot at granule", run.head);
      last = runs[i].slot;
      Granule& part = arena.granule(run.head + last / 64);
      part.bits.set(txn, part.bits.get() & ~(1ull << (last % 64)));
      --free_slots;
    }
    arena.granule(run.head).kind.set(txn,
                                     kind_word(GranuleKind::slab_head, run.size_class, free_slots));
    if (free_slots > 0) slab_push(arena, txn, run.head, run.size_class);
  }
  if (at < arena.granules_ready())
    mark_free(arena, txn, static_cast<std::uint32_t>(at),
              static_cast<std::uint32_t>(arena.granules_ready() - at));
}

void audit_blocks(const Arena& arena, std::vector<UsedBlock>& used,
                  std::vector<std::string>& problems) {
  auto report = [&problems](const std::string& what, std::uint64_t where) {
    problems.push_back("payload: " + what + " " + std::to_string(where));
  };
  std::vector<Run> const runs =
      runs_of(arena, used, [&](const char* what, std::uint64_t value) { report(what, value); });
  Header const& h = arena.header();
  std::uint64_t at = 0, free_extents = 0, open_slabs = 0, empty_slabs = 0;
  bool previous_free = false;
  std::size_t next = 0;
  while (at < arena.granules_ready()) {
    Granule const& g = arena.granule(at);
    std::uint32_t const word = g.kind.get();
    GranuleKind const kind = kind_of(word);
    std::uint64_t length = kind == GranuleKind::slab_head ? kSlabGranules : g.length.get();
    if (length == 0 || at + length > arena.granules_ready())
      return report("an extent with an impossible length at granule", at);
    if (kind == GranuleKind::free_head) {
      if (previous_free) report("two free extents not merged at granule", at);
      if (length > 1) {
        Granule const& last = arena.granule(at + length - 1);
        if (kind_of(last.kind.get()) != GranuleKind::free_tail || last.length.get() != length)
          report("a free extent without its tail at granule", at);
      }
      ++free_extents;
    } else if (kind == GranuleKind::used_head) {
      if (next >= runs.size() || runs[next].head != at || runs[next].size_class != kNil ||
          runs[next].length != length)
        return report("an extent that no object uses, or another one, at granule", at);
      ++next;
    } else if (kind == GranuleKind::slab_head) {
      std::uint32_t const size_class = class_in(word);
      if (size_class >= kClasses) return report("a slab of no class at granule", at);
      std::uint32_t free_slots = slots_per_slab(size_class);
      for (; next < runs.size() && runs[next].head == at; ++next) {
        const Run& run = runs[next];
        if (run.size_class != size_class)
          return report("an object in a foreign slab at granule", at);
        if ((arena.granule(at + run.slot / 64).bits.get() >> (run.slot % 64) & 1) != 0)
          report("an object in a free slab slot at granule", at);
        --free_slots;
      }
      std::uint32_t counted = 0;
      for (std::uint32_t i = 0; i < kSlabGranules; ++i)
        counted += static_cast<std::uint32_t>(std::popcount(arena.granule(at + i).bits.get()));
      if (counted != free_slots || free_slots_in(word) != free_slots)
        report("a slab whose free slots do not add up at granule", at);
      if (free_slots > 0) ++open_slabs;
      if (free_slots == slots_per_slab(size_class)) ++empty_slabs;
    } else {
      return report("no extent begins at granule", at);
    }
    previous_free = kind == GranuleKind::free_head;
    at += length;
  }
  if (next != runs.size()) report("objects outside every extent, by", runs.size() - next);
  if (h.empty_slabs.get() != empty_slabs)
    report("a wrong count of empty slabs:", h.empty_slabs.get());
  std::uint64_t listed = 0;
  for (std::uint32_t bin = 0; bin < kBins; ++bin) {
    bool const flagged = (h.bin_mask[bin / 64].get() >> (bin % 64) & 1) != 0;
    std::uint32_t node = h.bins[bin].get();
    if (flagged != (node != kNil)) report("a wrong bin mask at bin", bin);
    for (std::uint32_t before = kNil; node != kNil; node = arena.granule(node).next.get()) {
      Granule const& g = arena.granule(node);
      if (++listed > free_extents || kind_of(g.kind.get()) != GranuleKind::free_head ||
          bin_of(g.length.get()) != bin || g.previous.get() != before)
        return report("a broken free list in bin", bin);
      before = node;
    }
  }
  if (listed != free_extents) report("free extents missing from the bins:", free_extents - listed);
  listed = 0;
  for (std::uint32_t size_class = 0; size_class < kClasses; ++size_class) {
    std::uint32_t node = h.slabs[size_class].get();
    for (std::uint32_t before = kNil; node != kNil; node = arena.granule(node).next.get()) {
      Granule const& g = arena.granule(node);
      if (++listed > open_slabs || kind_of(g.kind.get()) != GranuleKind::slab_head ||
          class_in(g.kind.get()) != size_class || g.previous.get() != before)
        return report("a broken slab list in class", size_class);
      before = node;
    }
  }
  if (listed != open_slabs) report("slabs missing from their lists:", open_slabs - listed);
}

}  // namespace shmrl
