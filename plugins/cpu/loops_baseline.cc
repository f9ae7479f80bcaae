#define SHARP_ISA baseline
#include "isa.h"
#include "loops.h"

namespace sharp::cpu::baseline {

Loops find_loops(const Attributes& attributes) { return loops_for(attributes); }

}  // namespace sharp::cpu::baseline
