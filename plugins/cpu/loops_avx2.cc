#define SHARP_ISA avx2
#include "isa.h"
#include "loops.h"

namespace sharp::cpu::avx2 {

Loops find_loops(const Attributes& attributes) { return loops_for(attributes); }

}  // namespace sharp::cpu::avx2
