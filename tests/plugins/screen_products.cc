// Compares a key screen's products in one instruction set with products in plain 64-bit arithmetic, for every number of
// rows.
#define SHARP_ISA tested
#include "screen_products.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace sharp::cpu;

int main() {
  int wrong = 0, compared = 0;
  for (int64_t quads : {1, 2, 16, 24, 64})
    for (int64_t block_size : {16, 32})
      for (int rows = 1; rows <= tested::kScreenRows; ++rows)
        for (int extreme = 0; extreme < 2; ++extreme) {
          const int64_t stride = 4 * block_size, query_size = 4 * quads + 4;
          // The sum of products must fit 32 bits, as in bound_row.
          const int largest = std::min<int64_t>(tested::kLargestInteger, 2147483646 / (127 * 4 * quads));
          std::vector<int8_t> keys(quads * stride);
          std::vector<int16_t> query(rows * query_size), arranged;
          for (int8_t& key : keys) key = extreme ? (std::rand() % 2 ? 127 : -127) : std::rand() % 255 - 127;
          for (int row = 0; row < rows; ++row)
            for (int64_t channel = 0; channel < 4 * quads; ++channel)
              query[row * query_size + channel] =
                  extreme ? (std::rand() % 2 ? largest : -largest) : std::rand() % (2 * largest + 1) - largest;
          arranged = query;
          for (int row = 0; row < rows; ++row) tested::arrange_integers(arranged.data() + row * query_size, quads);
          std::vector<float> products(rows * kStripKeys);
          tested::kScreenProducts[rows - 1](keys.data(), keys.data(), stride, quads, arranged.data(), query_size,
                                            products.data());
          for (int row = 0; row < rows; ++row)
            for (int key = 0; key < kStripKeys; ++key) {
              int64_t sum = 0;
              for (int64_t channel = 0; channel < 4 * quads; ++channel)
                sum += int64_t{keys[channel / 4 * stride + key * 4 + channel % 4]} * query[row * query_size + channel];
              wrong += products[row * kStripKeys + key] != static_cast<float>(sum);
              ++compared;
            }
        }
  std::printf("%d %d\n", compared, wrong);
}
