// `ai.sharp::Attention` in float32 on the CPU.
#pragma once

#include "ort.h"

namespace sharp::ort {

const OrtCustomOp* attention_op();

}  // namespace sharp::ort
