#define SHARP_ISA neon_dotprod
#include "isa.h"
#include "loops.h"

namespace sharp::cpu::neon_dotprod {

Loops find_loops(const SharpAttributes& attributes) { return loops_for(attributes); }

}  // namespace sharp::cpu::neon_dotprod
