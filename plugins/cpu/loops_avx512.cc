#define SHARP_ISA avx512
#include "isa.h"
#include "loops.h"

namespace sharp::cpu::avx512 {

Loops find_loops(const Attributes& attributes) { return loops_for(attributes); }

}  // namespace sharp::cpu::avx512
