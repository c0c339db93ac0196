// Tiles of AMX of a thread. Only for sources that are compiled for AMX.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace asyncengine {
namespace {

// Shapes of the eight tiles: bytes of a row, and rows.
struct TileShapes {
  int64_t row_bytes[8], rows[8];
};

// Tiles hold data for as long as this lives: a thread that keeps them makes every switch of threads dearer.
class TileScope {
 public:
  explicit TileScope(const TileShapes& shapes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = static_cast<uint16_t>(shapes.row_bytes[tile]);
      config.rows[tile] = static_cast<uint8_t>(shapes.rows[tile]);
    }
    written(&config);
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

  // GCC does not know that tile instructions read memory.
  [[gnu::always_inline]] static inline void written(const void* p) { asm volatile("" ::"r"(p) : "memory"); }
};

}  // namespace
}  // namespace asyncengine
