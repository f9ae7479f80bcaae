// The checks of a call of either op, the same for every runtime. An adapter fills in the call, and an InputError says
// in one sentence why the call is not valid.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "call_sizes.h"

namespace sharp {

// An error of a node or a caller, in one sentence.
class InputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An input as a runtime describes it; a size that is not known yet is -1.
struct InputShape {
  bool given = false;
  std::vector<int64_t> sizes;
};

// Whether an input is given. An optional input without elements counts as left out, except a past without keys, which
// has four dimensions.
bool is_there(const ParameterDefinition& input, const InputShape& shape);

// Returns the normalizer of this name. Throws InputError.
SharpNormalizer normalizer_named(const std::string& name);

// Returns the default attributes. The caller must set those without a default: scale is NaN, the normalizer softmax.
SharpAttributes default_attributes();

// Reads or sets an attribute that is one number; an integer beyond 32 bits is clamped to 32 bits.
double number_of(const SharpAttributes& attributes, const AttributeDefinition& attribute);
void set_number(SharpAttributes& attributes, const AttributeDefinition& attribute, double number);

// Sets the temperature coefficients, highest power first. Throws InputError if there are too many or none.
void set_coefficients(SharpAttributes& attributes, const float* coefficients, int64_t count);

// Throws InputError unless every attribute is within its limits; `gpu`: within the limits of the GPU kernels, too.
void check_attributes(const SharpAttributes& attributes, bool gpu);

// Fills sizes and flags of a call from the shapes of its kInputCount inputs, and checks the shapes against each other.
// The call's attributes and types must be set. A size that is not known yet becomes -1, and a size that only inputs
// have that are left out becomes 0. Throws InputError, also for a required input that is missing.
void read_shapes(const InputShape* inputs, SharpPagedAttention& call);
void read_shapes(const InputShape* inputs, SharpAttention& call);

// Throws InputError unless sizes and types of a call are consistent, and head_params has as many columns as the
// normalizer takes.
void check_sizes(const SharpPagedAttention& call);
void check_sizes(const SharpAttention& call);

// Throws InputError if a number in the buffers, which must be on the host, is not valid. Of SharpAttention only
// head_params is checked; `read_lengths` checks its lengths.
void check_numbers(const SharpPagedAttention& call);
void check_numbers(const SharpAttention& call);

// Per sequence [batch]: keys before the call, and keys that count, from lengths on the host. Throws InputError.
struct Lengths {
  std::vector<int32_t> past, total;
};
Lengths read_lengths(const SharpAttention& call);

}  // namespace sharp
