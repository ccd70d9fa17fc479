// The header that stands before every value in the arena, as shmstore/headers.py describes it.
//
// Owns the byte format of the values that the binding reads and writes without Python: plain
// C-contiguous numpy arrays of up to five dimensions, and bytes. A test compares both descriptions.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace shmrl::py {

inline constexpr std::uint32_t kValueMagic = 0x31564853;  // "SHV1"
inline constexpr std::size_t kInlineDims = 5;

enum class Kind : std::uint8_t {
  array = 1,
  tensor = 2,
  bytes = 3,
  bytearray = 4,
  memoryview = 5,
  arrow = 6,
  pickle = 7,
};

inline constexpr std::uint8_t kFortran = 1;

struct ValueHeader {
  std::uint32_t magic = kValueMagic;
  Kind kind = Kind::bytes;
  std::uint8_t flags = 0;
  std::uint8_t ndim = 0;
  std::uint8_t dtype_code = 0;
  std::uint32_t header_bytes = sizeof(ValueHeader);
  std::uint32_t text_bytes = 0;
  std::uint64_t payload_bytes = 0;
  std::array<std::uint64_t, kInlineDims> shape{};
};
static_assert(sizeof(ValueHeader) == 64);

// Whether these bytes begin with the whole header of a value; its payload may lie elsewhere.
inline bool read_head(const std::byte* data, std::uint64_t size, ValueHeader& out) noexcept {
  if (size < sizeof(ValueHeader)) return false;
  std::memcpy(&out, data, sizeof(ValueHeader));
  return out.magic == kValueMagic && out.header_bytes >= sizeof(ValueHeader) &&
         out.header_bytes % 64 == 0 && out.header_bytes <= size;
}

// Whether the object's bytes begin with a header whose payload lies inside the object.
inline bool read_header(const std::byte* data, std::uint64_t size, ValueHeader& out) noexcept {
  return read_head(data, size, out) && out.payload_bytes <= size - out.header_bytes;
}

}  // namespace shmrl::py
