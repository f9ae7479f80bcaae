// `ai.sharp::Attention` on the CPU, for every float type; the past is of the type of the query.
#pragma once

#include <vector>

#include "ort.h"

namespace sharp::ort {

std::vector<const OrtCustomOp*> attention_ops();

}  // namespace sharp::ort
