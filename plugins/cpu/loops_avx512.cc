#define SHARP_ISA avx512
#include "isa.h"
#include "loops.h"
#include "vocabulary_loops.h"

namespace sharp::cpu::avx512 {

Loops find_loops(const SharpAttributes& attributes) { return loops_for(attributes); }

const VocabularyLoops vocabulary_loops = kVocabularyLoops;

}  // namespace sharp::cpu::avx512
