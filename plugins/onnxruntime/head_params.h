// The input head_params of both ops: a normalizer's own columns, and behind them the sinks.
#pragma once

#include <cmath>
#include <string>

#include "inputs.h"

namespace sharp::ort {

// Checks its shape and makes it part of `problem`, a cpu::Problem or cpu::ContiguousProblem. `tensor` is the input,
// with `data` its numbers. Throws InputError.
template <typename GivenTensor, typename AnyProblem>
void read_head_params(const GivenTensor& tensor, const float* data, AnyProblem& problem) {
  const cpu::NormalizerKind normalizer = problem.attributes.normalizer;
  const int64_t own = cpu::own_parameters(normalizer);
  const bool sinks = cpu::takes_sinks(normalizer);
  if ((own == 0 || !sinks) && !tensor.given()) return;
  tensor.expect_rank(2, own == 2 ? "[q_heads, 2]" : "[q_heads, 1]");
  const int64_t heads = tensor.dimension(0), width = tensor.dimension(1);
  const auto shape = [&](int64_t columns) {
    return "[q_heads, " + std::to_string(columns) + "] = [" + std::to_string(problem.q_heads) + ", " +
           std::to_string(columns) + "]";
  };
  if (!sinks && width != own)
    tensor.fail("must be " + shape(own) + " or left out; this normalizer has no sinks, as its keys do not compete");
  if (heads != problem.q_heads || (width != own && width != own + 1))
    tensor.fail("must be " +
                (own > 0 ? shape(own) + ", or " + shape(own + 1) + " with sinks" : shape(1) + ", the sinks"));
  if (width == 0) return;
  problem.head_params = data;
  problem.head_params_width = width;
  if (width > own) problem.sinks = data + own;
}

// Of a problem whose inputs are on the host. Throws InputError.
template <typename AnyProblem>
void check_head_params(const AnyProblem& problem) {
  if (problem.head_params == nullptr) return;
  for (int64_t head = 0; head < problem.q_heads; ++head) {
    const float* row = problem.head_params + head * problem.head_params_width;
    const std::string name = "head_params[" + std::to_string(head) + "]";
    if (!cpu::takes_sinks(problem.attributes.normalizer)) {
      for (int64_t column = 0; column < problem.head_params_width; ++column)
        if (!std::isfinite(row[column])) throw InputError(name + " has a number that is not finite");
      continue;
    }
    if (cpu::own_parameters(problem.attributes.normalizer) > 0 && !(row[0] > 0 && row[1] > 0))
      throw InputError(name + " is (" + std::to_string(row[0]) + ", " + std::to_string(row[1]) +
                       "); ssa needs b > 0 and n > 0");
    const float sink = problem.sinks == nullptr ? 0.0f : row[problem.head_params_width - 1];
    if (!(sink < INFINITY))
      throw InputError(name + " has the sink " + std::to_string(sink) + "; it must be a number, or -infinity for none");
  }
}

}  // namespace sharp::ort
