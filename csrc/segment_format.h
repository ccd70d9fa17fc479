// A segment of the trainer as it lies in the arena: an Arrow stream with a trailer behind its end
// that says where the parts are. The format is `trainer/segment_codec.py`'s, which writes it; a
// test reads back here what is written there.
//
// Owns the trailer's bytes and the checks that nothing it names lies outside the object. Pure: no
// arena, no Python. Called by csrc/bindings_segments.cc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace shmrl {

// The last bytes of the object. Places count from the beginning of the payload.
struct [[gnu::packed]] SegmentTrailer {
  std::array<char, 8> end_of_stream;
  std::uint64_t payload_bytes;  // this trailer included
  std::uint32_t n, body_at, n_routed;
  std::uint16_t layers, top_k, itemsize, n_before;
  std::uint32_t text_at, before_at;
  std::array<char, 8> magic;
  std::array<char, 10> text_digits;
};
static_assert(sizeof(SegmentTrailer) == 62);

inline constexpr std::string_view kSegmentMagic = "segment2";

// What a segment can say; Python takes these from the module, and has the sentences for more.
inline constexpr std::uint64_t kExpertsPerTokenMax = UINT16_MAX;  // layers times top_k
inline constexpr std::uint64_t kRowsBeforeMax = UINT16_MAX;
// Of the text, and of the rows before: they travel in Arrow metadata, which ends at 2 GiB.
inline constexpr std::uint64_t kMetadataBytesMax = 1ull << 26;

// Where a segment's parts lie; places count from the object's first byte. Four columns of `n`
// int32 or float32 from `numbers_at` on, `column_bytes` apart; with `itemsize` above 0 the experts
// of `n` tokens from `routed_at` on, of which `n_routed` are known, and those of `n_before` tokens
// before the segment from `before_at` on.
struct SegmentPlaces {
  std::uint64_t n = 0;
  std::uint64_t numbers_at = 0, column_bytes = 0;
  std::uint64_t layers = 0, top_k = 0, itemsize = 0;
  std::uint64_t routed_at = 0, n_routed = 0;
  std::uint64_t before_at = 0, n_before = 0;
  std::uint64_t text_at = 0, text_bytes = 0;

  std::uint64_t row_bytes() const noexcept { return layers * top_k * itemsize; }
};

enum class SegmentKind { none, whole, damaged };

// `size`: of the object. `none`: no trailer; `damaged`: one that names places outside the object.
inline SegmentKind find_segment(const std::byte* data, std::uint64_t size,
                                SegmentPlaces& out) noexcept {
  SegmentTrailer trailer;
  if (size < sizeof(trailer)) return SegmentKind::none;
  const std::uint64_t trailer_at = size - sizeof(trailer);
  std::memcpy(&trailer, data + trailer_at, sizeof(trailer));
  if (std::memcmp(trailer.magic.data(), kSegmentMagic.data(), kSegmentMagic.size()) != 0 ||
      trailer.payload_bytes > size)
    return SegmentKind::none;
  std::uint64_t text_bytes = 0;
  for (const char digit : trailer.text_digits) {
    if (digit < '0' || digit > '9') return SegmentKind::none;
    text_bytes = text_bytes * 10 + static_cast<std::uint64_t>(digit - '0');
  }
  const std::uint64_t start = size - trailer.payload_bytes, n = trailer.n;
  out.n = n;
  out.numbers_at = start + trailer.body_at;
  out.column_bytes = 4 * (n + n % 2);
  out.layers = trailer.layers;
  out.top_k = trailer.top_k;
  out.itemsize = trailer.itemsize;
  out.routed_at = out.numbers_at + 4 * out.column_bytes;
  out.n_routed = trailer.n_routed;
  out.before_at = start + trailer.before_at;
  out.n_before = trailer.n_before;
  out.text_at = start + trailer.text_at;
  out.text_bytes = text_bytes;
  // Whether `bytes` from `at` on end before the trailer; no sum of two of these overflows.
  const auto fits = [&](std::uint64_t at, std::uint64_t bytes) { return at + bytes <= trailer_at; };
  std::uint64_t routed_bytes = 0;
  const bool sound = out.itemsize <= 2 &&
                     !__builtin_mul_overflow(n, out.row_bytes(), &routed_bytes) &&
                     routed_bytes <= size && fits(out.routed_at, routed_bytes) &&
                     fits(out.before_at, out.n_before * out.row_bytes()) &&
                     fits(out.text_at, text_bytes) && out.n_routed <= n;
  return sound ? SegmentKind::whole : SegmentKind::damaged;
}

}  // namespace shmrl
