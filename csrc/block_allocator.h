// Payload memory: extents of 4 KiB granules with boundary coalescing and segregated
// last-in-first-out free lists, and 64 KiB slabs with bitmaps for objects of 32 KiB and less.
//
// Owns the granule table, the bins and the slab lists. All of it is derived from the object table:
// after a crash rebuild() computes it anew, so nothing here is logged.
// Promises: O(1) allocate and free; blocks are 64-byte aligned, 4 KiB aligned above 32 KiB; if a
// free extent fits it is found (no "full" by rounding); the block freed last is handed out first,
// because a warm page is several times cheaper than a cold one. Called with the lock held, by
// object_table, recovery, audit and the facade.
#pragma once

#include <cstdint>
#include <vector>

#include "arena.h"
#include "robust_lock.h"

namespace shmrl {

struct Block {
  std::uint64_t offset = 0;  // in the payload region
  std::uint64_t slot = kNoSlabSlot;
};

enum class AllocateResult {
  ok,
  grow,  // reserve more payload (plan_growth) without the lock, then try again
  full,
};

AllocateResult allocate_block(Arena& arena, const Txn& txn, std::uint64_t size, Block& out);
void free_block(Arena& arena, const Txn& txn, std::uint64_t size, const Block& block);

// Bytes that an object of `size` really takes.
std::uint64_t block_bytes(std::uint64_t size) noexcept;
// The largest object that could be allocated now, growth included.
std::uint64_t largest_free_bytes(const Arena& arena);
// Gives empty slabs back to the extents.
void trim_slabs(Arena& arena, const Txn& txn);

// The granules to reserve so that an object of `size` fits.
struct Growth {
  std::uint64_t from = 0, to = 0;
};
Growth plan_growth(const Arena& arena, std::uint64_t size);
// Makes the reserved granules usable, unless somebody else grew meanwhile.
void commit_growth(Arena& arena, const Txn& txn, const Growth& growth);

struct UsedBlock {
  std::uint64_t size;
  Block block;
};
// From the blocks that objects use. Throws Failure(corrupt) when they overlap.
void rebuild_blocks(Arena& arena, const Txn& txn, std::vector<UsedBlock>& used);
// Appends what is inconsistent between the granule table and the blocks that objects use.
void audit_blocks(const Arena& arena, std::vector<UsedBlock>& used,
                  std::vector<std::string>& problems);

}  // namespace shmrl
