// Every structure that lives in an arena file: fixed width, trivially copyable, addressed by index.
//
// docs/store_layout.md explains each byte and each state. A change here changes kLayoutVersion.
// Truth is marked T, what can be rebuilt from it (derived) D.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cell.h"

namespace shmrl {

inline constexpr std::uint64_t kMagic = 0x314C524D48536D61ull;  // "amSHMRL1"
inline constexpr std::uint32_t kLayoutVersion = 2;

inline constexpr std::uint32_t kNil = UINT32_MAX;
inline constexpr std::uint32_t kSlots = 256;  // slot 0 is the joiner's, 1..255 are clients
inline constexpr std::uint32_t kMaskWords = kSlots / 64;
inline constexpr std::uint32_t kWaitersMax = 256;  // reservations queued for space at one time

inline constexpr std::uint64_t kGranule = 4096;     // unit of extents
inline constexpr std::uint32_t kSlabGranules = 16;  // a slab is 64 KiB
inline constexpr std::uint64_t kSlabBytes = kGranule * kSlabGranules;
inline constexpr std::uint64_t kSlabObjectMax = 32768;  // larger objects get an extent
inline constexpr std::uint64_t kSlackBytes = 65536;     // payload beyond the capacity, for headers
inline constexpr std::uint32_t kExactBins = 64;
inline constexpr std::uint32_t kBins = kExactBins + 4 * 26;
inline constexpr std::uint32_t kBinWords = (kBins + 63) / 64;

// Sizes of slab slots: at most 25 % waste, all multiples of 64.
inline constexpr std::array<std::uint32_t, 31> kClassBytes = {
    64,   128,  192,   256,   320,   384,   448,   512,  640,  768,  896,
    1024, 1280, 1536,  1792,  2048,  2560,  3072,  3584, 4096, 5120, 6528,
    8192, 9344, 10880, 13056, 16384, 21824, 32768, 0,    0};
inline constexpr std::uint32_t kClasses = 29;

// ---------------------------------------------------------------------------------------------
// Objects

// State word: generation << 16 | flags | state. Its low half is also the futex word of those who
// wait for the seal.
namespace object_state {
inline constexpr std::uint64_t kFree = 0;
inline constexpr std::uint64_t kBuilding = 1;
inline constexpr std::uint64_t kSealed = 2;
inline constexpr std::uint64_t kEnding =
    3;  // sealed; somebody with the lock decides whether it ends
inline constexpr std::uint64_t kDoomed = 4;   // ended; bytes stay until the last pin goes
inline constexpr std::uint64_t kSpilled = 5;  // reserved: payload on disk
inline constexpr std::uint64_t kStateMask = 0xFF;
inline constexpr std::uint64_t kEverAttached = 1u << 8;
inline constexpr std::uint64_t kWaiters = 1u << 9;  // somebody sleeps on the word
inline constexpr std::uint64_t kFlagMask = 0xFF00;
inline constexpr unsigned kGenerationShift = 16;
inline constexpr std::uint64_t kGenerationMax = (1ull << 48) - 1;
}  // namespace object_state

struct ObjectEntry {
  Shared<std::uint64_t> state;              // T
  Shared<std::uint64_t> holds[kMaskWords];  // T: bit s: client s has a counted reference
  Shared<std::uint64_t> pins[kMaskWords];   // T: bit s: client s has a live view or draft
  Cell<std::uint64_t> offset;               // T: bytes from the start of the payload region
  Cell<std::uint64_t> size;                 // T: size in bytes | slab slot << 48 (0xFFFF: extent)
  Cell<std::uint32_t> attached;             // D: in how many session positions it stands
  Cell<std::uint32_t> next_free;            // D
};
static_assert(sizeof(ObjectEntry) == 96);
inline constexpr std::uint64_t kSizeMask = (1ull << 48) - 1;
inline constexpr std::uint64_t kNoSlabSlot = 0xFFFF;

// One position of a session's list.
struct Attachment {
  Cell<std::uint64_t> generation;  // T: of the object
  Cell<std::uint32_t> object;      // T
  Cell<std::uint32_t> parent;      // T: position, kNil: none
  Cell<std::uint32_t> next;        // T: next position's node (or the free list's: D)
  Cell<std::uint32_t> previous;    // D
  Cell<std::uint64_t> reserved;
};
static_assert(sizeof(Attachment) == 32);

// ---------------------------------------------------------------------------------------------
// Sessions and owners

// Session state word: generation << 32 | owner << 16 | state.
namespace session_state {
inline constexpr std::uint64_t kFree = 0;
inline constexpr std::uint64_t kOpen = 1;
inline constexpr std::uint64_t kStateMask = 0xFFFF;
inline constexpr unsigned kOwnerShift = 16;
inline constexpr unsigned kGenerationShift = 32;
}  // namespace session_state

struct SessionEntry {
  Cell<std::uint64_t> state;           // T: commits open, transfer, release
  Name id;                             // T
  Cell<std::uint32_t> head;            // T: first node, if count > 0
  Cell<std::uint32_t> count;           // T: commits attach and truncate
  Cell<std::uint32_t> tail;            // D
  Cell<std::uint32_t> hash;            // D
  Cell<std::uint32_t> hash_next;       // D: chain in the index, or the free list
  Cell<std::uint32_t> owner_previous;  // D: list of the owner's sessions
  Cell<std::uint32_t> owner_next;      // D
  Cell<std::uint32_t> reserved;
  Cell<std::uint64_t> bytes;   // D: sum of its objects' sizes
  Cell<std::uint64_t> opened;  // T: order of opening
  Cell<std::uint64_t> reserved2;
};
static_assert(sizeof(SessionEntry) == 128);

struct OwnerEntry {
  Name name;                              // T
  Cell<std::uint32_t> used;               // T: commits
  Cell<std::uint32_t> heir;               // T: owner index, kNil: none
  Cell<std::uint64_t> bound[kMaskWords];  // T: clients that act as this owner
  Cell<std::uint64_t> objects;            // D
  Cell<std::uint64_t> bytes;              // D
  Cell<std::uint32_t> sessions;           // D
  Cell<std::uint32_t> first;              // D
  Cell<std::uint32_t> last;               // D
  Cell<std::uint32_t> hash_next;          // D: chain in the index, or the free list
};
static_assert(sizeof(OwnerEntry) == 136);

// ---------------------------------------------------------------------------------------------
// Clients and waiters

struct alignas(64) ClientEntry {
  Cell<std::int64_t> pid;
  Cell<std::int64_t> joined_unix_ns;
  Shared<std::uint64_t> puts;  // by this client's threads only, relaxed: figures
  Shared<std::uint64_t> gets;
  Shared<std::uint64_t> pinned;  // objects with a pin bit of this client
  Shared<std::uint64_t> drafts;  // of these, unsealed
  Cell<std::uint64_t> reserved[2];
};
static_assert(sizeof(ClientEntry) == 64);

namespace wake {
inline constexpr std::uint32_t kAsleep = 0;
inline constexpr std::uint32_t kLook = 1;
inline constexpr std::uint32_t kGone = 2;  // left without the lock: a free entry, but for the count
}  // namespace wake

struct WaiterEntry {
  Cell<std::uint64_t> ticket;  // T: 0: free; the lowest is the head of the queue
  Cell<std::uint64_t> size;
  Cell<std::uint32_t> slot;    // T: who waits
  Shared<std::uint32_t> wake;  // futex: one of wake::*
  Cell<std::uint64_t> passed;  // bytes that smaller reservations took ahead of it
};
static_assert(sizeof(WaiterEntry) == 32);

// ---------------------------------------------------------------------------------------------
// Payload granules (all derived)

enum class GranuleKind : std::uint32_t {
  interior = 0,  // also the last granule of a used extent
  free_head = 1,
  free_tail = 2,
  used_head = 3,
  slab_head = 4,
  slab_body = 5,
};

struct Granule {
  Cell<std::uint32_t> kind;    // GranuleKind | class << 8 | free slots << 16
  Cell<std::uint32_t> length;  // granules of the extent (heads and tails); slab body: its head
  Cell<std::uint32_t> previous;
  Cell<std::uint32_t> next;
  Cell<std::uint64_t> bits;  // slab: free slots 64 i .. 64 i + 63 in the slab's i-th granule
};
static_assert(sizeof(Granule) == 24);

// ---------------------------------------------------------------------------------------------
// Header

// A table that grows: entries below `used` have been used, those below `ready` are backed by
// memory.
struct Table {
  std::uint64_t offset;  // in the file; fixed at creation, like `limit`
  std::uint64_t limit;
  Cell<std::uint64_t> used;   // T: only grows
  Cell<std::uint64_t> ready;  // T: only grows
};

enum class JournalOp : std::uint64_t { none = 0, release = 1, transfer = 2, doom = 3 };
// Journal word: op | owner << 8 | count << 32. Zero: nothing committed.

struct alignas(4096) Header {
  std::uint64_t magic;
  std::uint32_t layout_version;
  std::uint32_t header_bytes;
  std::uint64_t abi_hash;
  std::uint64_t arena_id;
  std::uint64_t file_bytes;
  std::uint64_t capacity;
  std::uint64_t lock_inode;
  std::uint64_t granules;  // of payload, slack included
  std::uint64_t payload_offset;
  std::int64_t creator_pid;
  std::int64_t created_unix_ns;
  std::uint32_t uid;
  std::uint32_t session_buckets;  // powers of two
  std::uint32_t owner_buckets;
  std::uint32_t padding;
  std::uint64_t clients_offset;
  std::uint64_t waiters_offset;
  std::uint64_t session_index_offset;
  std::uint64_t owner_index_offset;
  std::uint64_t journal_offset;
  Table owners;
  Table sessions;
  Table attachments;
  Table objects;
  Table journal_table;  // u32 entries
  Table payload;        // unit: granule; `ready`: usable granules, `used` unused

  alignas(64) Shared<std::uint32_t> lock;  // 0, or (slot + 1) | kLockWaiters
  Cell<std::uint32_t> lock_padding;
  Shared<std::uint64_t> dirty;          // 1: a transaction is (or died) under way
  Cell<std::uint64_t> journal;          // T
  Cell<std::uint64_t> next_generation;  // T: only grows
  Cell<std::uint64_t> waiters;          // D: queued reservations
  Cell<std::uint64_t> used_bytes;       // D
  Cell<std::uint32_t> free_object;      // D
  Cell<std::uint32_t> free_attachment;  // D
  Cell<std::uint32_t> free_session;     // D
  Cell<std::uint32_t> free_owner;       // D

  alignas(64) Cell<std::uint64_t> live[kMaskWords];  // T: joined clients
  Cell<std::uint64_t> objects_live;                  // D: entries that are not free
  Cell<std::uint64_t> objects_doomed;                // D
  Cell<std::uint64_t> doomed_bytes;                  // D: allocated bytes under doomed objects
  Cell<std::uint64_t> sessions_open;                 // D
  Cell<std::uint64_t> next_opened;                   // T: only grows
  Cell<std::uint64_t> next_ticket;                   // T: only grows
  Cell<std::uint64_t> empty_slabs;                   // D

  // Figures (not repaired after a crash, except that they never block anything).
  alignas(64) Cell<std::uint64_t> puts_past;
  Cell<std::uint64_t> gets_past;
  Cell<std::uint64_t> frees;
  Cell<std::uint64_t> discards;
  Cell<std::uint64_t> reclaimed;
  Cell<std::uint64_t> sessions_opened;
  Cell<std::uint64_t> sessions_released;
  Cell<std::uint64_t> sessions_transferred;
  Cell<std::uint64_t> sweeps;
  Cell<std::uint64_t> recoveries;
  Cell<std::uint64_t> full_waits;

  alignas(64) Cell<std::uint64_t> bin_mask[kBinWords];  // D: bins that are not empty
  Cell<std::uint32_t> bins[kBins];                      // D: free extents by length
  Cell<std::uint32_t> slabs[kClasses + 1];              // D: slabs with a free slot, by class
};
static_assert(sizeof(Header) == 4096);
static_assert(std::is_standard_layout_v<Header> && std::is_trivially_copyable_v<Header>);

inline constexpr std::uint32_t kLockWaiters = 1u << 31;

constexpr std::uint64_t fnv(std::uint64_t hash, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) hash = (hash ^ ((value >> (8 * i)) & 0xFF)) * 1099511628211ull;
  return hash;
}

// Two builds that agree on this agree on every byte of an arena.
constexpr std::uint64_t kAbiHash = [] {
  std::uint64_t h = 14695981039346656037ull;
  for (std::uint64_t value :
       {std::uint64_t{kLayoutVersion}, std::uint64_t{sizeof(Header)},
        std::uint64_t{sizeof(ObjectEntry)}, std::uint64_t{sizeof(Attachment)},
        std::uint64_t{sizeof(SessionEntry)}, std::uint64_t{sizeof(OwnerEntry)},
        std::uint64_t{sizeof(ClientEntry)}, std::uint64_t{sizeof(WaiterEntry)},
        std::uint64_t{sizeof(Granule)}, std::uint64_t{offsetof(Header, lock)},
        std::uint64_t{offsetof(Header, live)}, std::uint64_t{offsetof(Header, puts_past)},
        std::uint64_t{offsetof(Header, bin_mask)}, std::uint64_t{kGranule}, std::uint64_t{kClasses},
        std::uint64_t{kBins}, std::uint64_t{__BYTE_ORDER__}}) {
    h = fnv(h, value);
  }
  return h;
}();

}  // namespace shmrl
