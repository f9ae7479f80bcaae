#define SHARP_ISA avx512_vnni
#include "isa.h"
#include "loops.h"

namespace sharp::cpu::avx512_vnni {

Loops find_loops(const SharpAttributes& attributes) { return loops_for(attributes); }

}  // namespace sharp::cpu::avx512_vnni
