// Rules about the trailer of a segment: whatever it says, nothing outside the object is read.
#include "rules.h"
#include "segment_format.h"

using namespace shmrl;
using namespace shmrl::test;

namespace {

// Three tokens with experts of two layers, one expert each; text of five bytes; a row before it.
SegmentTrailer sound_trailer() {
  SegmentTrailer t{};
  t.n = 3;
  t.text_at = 8;
  t.before_at = 16;
  t.body_at = 24;
  t.n_routed = 2;
  t.layers = 2;
  t.top_k = 1;
  t.itemsize = 1;
  t.n_before = 1;
  t.payload_bytes = 24 + 4 * 16 + 8 + sizeof(t);
  std::memcpy(t.magic.data(), kSegmentMagic.data(), t.magic.size());
  std::memcpy(t.text_digits.data(), "0000000005", t.text_digits.size());
  return t;
}

// An object of exactly its size on the heap, so that a sanitizer sees what is read beside it.
std::vector<std::byte> object_with(const SegmentTrailer& trailer, std::size_t size) {
  std::vector<std::byte> object(size, std::byte{1});
  std::memcpy(object.data() + size - sizeof(trailer), &trailer, sizeof(trailer));
  return object;
}

bool inside(std::uint64_t at, std::uint64_t bytes, std::uint64_t size) {
  return at <= size && bytes <= size - at;
}

RULE(a_segments_parts_are_where_its_trailer_says) {
  constexpr std::size_t kHeader = 64;  // the store's own, before the payload
  const SegmentTrailer trailer = sound_trailer();
  const auto object = object_with(trailer, kHeader + trailer.payload_bytes);
  SegmentPlaces places;
  EXPECT(find_segment(object.data(), object.size(), places) == SegmentKind::whole);
  EXPECT(places.n == 3 && places.numbers_at == kHeader + 24 && places.column_bytes == 16);
  EXPECT(places.routed_at == kHeader + 24 + 64 && places.row_bytes() == 2);
  EXPECT(places.n_routed == 2 && places.n_before == 1 && places.before_at == kHeader + 16);
  EXPECT(places.text_at == kHeader + 8 && places.text_bytes == 5);
}

RULE(what_ends_in_no_trailer_is_no_segment) {
  const SegmentTrailer trailer = sound_trailer();
  SegmentPlaces places;
  EXPECT(find_segment(nullptr, 0, places) == SegmentKind::none);
  for (std::size_t size = 0; size < sizeof(trailer); ++size) {
    const std::vector<std::byte> object(size);
    EXPECT(find_segment(object.data(), size, places) == SegmentKind::none);
  }
  for (int which = 0; which < 3; ++which) {
    SegmentTrailer other = trailer;
    if (which == 0) other.magic[3] = 'x';
    if (which == 1) other.text_digits[9] = '/';
    if (which == 2) other.payload_bytes = trailer.payload_bytes + 1;
    const auto object = object_with(other, trailer.payload_bytes);
    EXPECT(find_segment(object.data(), object.size(), places) == SegmentKind::none);
  }
}

RULE(a_trailer_that_names_places_outside_its_object_is_damaged) {
  const auto kind_of = [](auto change) {
    SegmentTrailer trailer = sound_trailer();
    const std::size_t size = trailer.payload_bytes;
    change(trailer);
    const auto object = object_with(trailer, size);
    SegmentPlaces places;
    return find_segment(object.data(), object.size(), places);
  };
  using T = SegmentTrailer;
  EXPECT(kind_of([](T&) {}) == SegmentKind::whole);
  EXPECT(kind_of([](T& t) { t.n = UINT32_MAX; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.n = 5; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.body_at += 8; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.itemsize = 3; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.n_routed = 4; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.n_before = 999; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.before_at = UINT32_MAX; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.text_at = UINT32_MAX; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.text_digits[0] = '9'; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.payload_bytes = 0; }) == SegmentKind::damaged);
  EXPECT(kind_of([](T& t) { t.layers = t.top_k = UINT16_MAX; }) == SegmentKind::damaged);
}

RULE(no_trailer_leads_outside_its_object) {
  std::uint64_t state = 88172645463325252ull;
  const auto random = [&](std::uint64_t below) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
  };
  const std::size_t size = 64 + sound_trailer().payload_bytes;
  int whole = 0, damaged = 0;
  for (int round = 0; round < 200'000; ++round) {
    SegmentTrailer trailer = sound_trailer();
    std::array<std::byte, sizeof(trailer)> raw;
    std::memcpy(raw.data(), &trailer, sizeof(trailer));
    for (std::uint64_t i = random(4); i-- > 0;)
      raw[random(raw.size())] = static_cast<std::byte>(random(256));
    std::memcpy(&trailer, raw.data(), sizeof(trailer));
    SegmentPlaces p;
    const SegmentKind kind = find_segment(object_with(trailer, size).data(), size, p);
    damaged += kind == SegmentKind::damaged;
    if (kind != SegmentKind::whole) continue;
    ++whole;
    EXPECT(inside(p.numbers_at, 3 * p.column_bytes + 4 * p.n, size));
    EXPECT(inside(p.routed_at, p.n * p.row_bytes(), size));
    EXPECT(inside(p.before_at, p.n_before * p.row_bytes(), size));
    EXPECT(inside(p.text_at, p.text_bytes, size) && p.n_routed <= p.n);
  }
  EXPECT(whole > 1000 && damaged > 1000);
}

}  // namespace
