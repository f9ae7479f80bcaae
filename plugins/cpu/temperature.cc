#include "temperature.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "finish.h"

namespace sharp::cpu {

void find_temperature(const Problem& problem, const Part* parts, int64_t count, int64_t index) {
  const SharpAttributes& attributes = problem.attributes;
  const RowSums sums = merge_sums(parts, count, index);
  const double entropy = std::log(sums.sum) - sums.weighted_log / sums.sum;
  double beta = 1;
  if (entropy > attributes.entropy_threshold) {
    double polynomial = 0;
    for (int64_t term = 0; term < attributes.temperature_terms; ++term)
      polynomial = polynomial * entropy + attributes.temperature_coefficients[term];
    beta = polynomial > 1 ? polynomial : 1;
  }
  for (int64_t part = 0; part < count; ++part) {
    RowState& state = parts[part].states[index];
    std::fill_n(state.sum, kStateLanes, 0.0f);
    std::fill_n(state.weighted_log, kStateLanes, 0.0f);
    state.shift = -std::numeric_limits<float>::infinity();
    state.inverse_temperature = static_cast<float>(beta);
  }
}

}  // namespace sharp::cpu
