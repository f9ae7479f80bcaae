#include "screen.h"

#include <algorithm>

namespace sharp::cpu {

void merge_bounds(const Part* parts, int64_t count, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    float lower = parts[0].states[row].highest_lower, upper = parts[0].states[row].lowest_upper;
    for (int64_t part = 1; part < count; ++part) {
      lower = std::max(lower, parts[part].states[row].highest_lower);
      upper = std::min(upper, parts[part].states[row].lowest_upper);
    }
    for (int64_t part = 0; part < count; ++part) {
      parts[part].states[row].highest_lower = lower;
      parts[part].states[row].lowest_upper = upper;
    }
  }
}

}  // namespace sharp::cpu
