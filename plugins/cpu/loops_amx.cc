#define SHARP_ISA amx
#include "isa.h"
#include "loops.h"

namespace sharp::cpu::amx {

Loops find_loops(const SharpAttributes& attributes) { return loops_for(attributes); }

}  // namespace sharp::cpu::amx
