// Prints the largest error of each vector function, in units that the Python test bounds.
#include <cmath>
#include <cstdio>
#include <limits>

#define SHARP_ISA tested
#include "vector_math.h"

using namespace sharp::cpu::tested;

namespace {

double relative(double actual, double expected) { return std::fabs(actual - expected) / std::fabs(expected); }
double absolute_error(double actual, double expected) { return std::fabs(actual - expected); }

template <typename Function, typename Exact, typename Error>
double largest_error(double from, double to, Function function, Exact exact, Error error) {
  double worst = 0;
  const int count = 2000000;
  for (int index = 0; index <= count; ++index) {
    const float x = static_cast<float>(from + (to - from) * index / count);
    const double difference = error(function(splat(x))[index % kLanes], exact(static_cast<double>(x)));
    if (!(difference <= worst)) worst = difference;
  }
  return worst;
}

}  // namespace

int main() {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const auto exp_ = [](double x) { return std::exp(x); };
  std::printf("exp %.3g\n", largest_error(-87, 0, exp_nonpositive, exp_, relative));
  std::printf("log %.3g\n", largest_error(1.5, 1e6, log_positive, [](double x) { return std::log(x); }, relative));
  std::printf("log_near_1 %.3g\n",
              largest_error(1e-3, 1.5, log_positive, [](double x) { return std::log(x); }, absolute_error));
  std::printf("tanh %.3g\n", largest_error(1e-3, 20, tanh_of, [](double x) { return std::tanh(x); }, relative));
  std::printf("power %.3g\n", largest_error(
                                  1e-4, 1, [](Vec x) { return power_of(x, 3.7f); },
                                  [](double x) { return std::pow(x, 3.7f); }, relative));
  const bool edges = exp_nonpositive(splat(-infinity))[0] == 0 && exp_nonpositive(splat(0.0f))[0] == 1 &&
                     exp_nonpositive(splat(-1e30f))[0] == 0 && std::isnan(exp_nonpositive(splat(nan))[0]) &&
                     log_positive(splat(1.0f))[0] == 0 && log_positive(splat(infinity))[0] == infinity &&
                     std::isnan(log_positive(splat(nan))[0]) && tanh_of(splat(infinity))[0] == 1 &&
                     tanh_of(splat(-infinity))[0] == -1 && std::isnan(tanh_of(splat(nan))[0]) &&
                     power_of(splat(0.0f), 0.5f)[0] == 0 && power_of(splat(1.0f), 5.0f)[0] == 1 &&
                     std::isnan(power_of(splat(nan), 2.5f)[0]);
  Vec numbers = lane_numbers();
  const bool lanes = sum_of(numbers) == kLanes * (kLanes - 1) / 2 && maximum_of(numbers) == kLanes - 1 &&
                     minimum_of(numbers) == 0 && sum_of(select(lanes_of(0b1010), splat(1.0f), Vec{})) == 2;
  std::printf("edges %d\nlanes %d\n", !edges, !lanes);
}
