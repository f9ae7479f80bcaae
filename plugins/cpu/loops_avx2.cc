#define SHARP_ISA avx2
#include "isa.h"
#include "loops.h"
#include "vocabulary_loops.h"

namespace sharp::cpu::avx2 {

Loops find_loops(const SharpAttributes& attributes) { return loops_for(attributes); }

const VocabularyLoops vocabulary_loops = kVocabularyLoops;

}  // namespace sharp::cpu::avx2
