// Sampling of tokens from logits, and log probabilities, which `sharp.plugins.cpu.sampling` calls through ctypes.
#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "isa.h"

namespace sharp::cpu {
namespace {

int64_t whole_blocks(int64_t count) { return (count + kVocabularyBlock - 1) / kVocabularyBlock; }

int32_t bits_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float from_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The buffers for one row of logits after another, which stay in the processor's cache.
class Vocabulary {
 public:
  explicit Vocabulary(int64_t tokens)
      : loops_(vocabulary_loops()),
        tokens_(tokens),
        weights_(whole_blocks(tokens) * kVocabularyBlock),
        sums_(whole_blocks(tokens)),
        maxima_(sums_.size()),
        places_(weights_.size()),
        candidates_(weights_.size() + kVocabularyBlock),
        narrowed_(candidates_.size()),
        gathered_(tokens) {}

  int64_t tokens() const { return tokens_; }

  int64_t sample(const float* logits, const SharpSampling& row) {
    const Peak best = loops_.peak(logits, tokens_, maxima_.data());
    if (!std::isfinite(best.value)) return -1;
    if (row.sharpness == 0) return best.index;
    const int64_t top_k = static_cast<int64_t>(row.top_k);
    // With a small top_k, only few tokens need weights.
    const bool few = top_k > 0 && top_k <= whole_blocks(tokens_);
    const int64_t count = few ? gather(logits, nth_maximum(top_k, whole_blocks(tokens_))) : tokens_;
    weigh(few ? gathered_.data() : logits, count, best.value, static_cast<float>(row.sharpness));
    const float lowest = std::max(lowest_kept(top_k, row.top_p), static_cast<float>(row.min_p));
    if (lowest > 0) loops_.cut(weights_.data(), count_, lowest, sums_.data());
    const int64_t sampled = draw(row.random);
    return few ? places_[sampled] : sampled;
  }

  // Finds the `top` most likely tokens, ties by smaller id, and returns the logarithm of the sum of e^logit. If the
  // highest logit is not finite, finds the first tokens and returns NaN.
  double most_likely(const float* logits, int64_t top, int64_t* found) {
    const Peak best = loops_.peak(logits, tokens_, maxima_.data());
    if (!std::isfinite(best.value)) {
      std::iota(found, found + top, 0);
      return std::nan("");
    }
    if (top > 0) {
      const int64_t blocks = whole_blocks(tokens_);
      const float bound = top <= blocks ? nth_maximum(top, blocks) : -std::numeric_limits<float>::infinity();
      const int64_t count = loops_.collect(logits, tokens_, bound, places_.data());
      std::partial_sort(
          places_.begin(), places_.begin() + top, places_.begin() + count,
          [logits](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
      std::copy_n(places_.begin(), top, found);
    }
    weigh(logits, tokens_, best.value, 1);
    return best.value + std::log(total());
  }

 private:
  static constexpr int kStepsToNarrow = 3;

  int64_t blocks() const { return whole_blocks(count_); }
  int64_t padded() const { return blocks() * kVocabularyBlock; }
  double total() const { return std::accumulate(sums_.begin(), sums_.begin() + blocks(), 0.0); }

  // Computes the weights of all tokens, or of the gathered ones; all later steps use these.
  void weigh(const float* logits, int64_t count, float highest, float sharpness) {
    count_ = count;
    loops_.weigh(logits, count, highest, sharpness, weights_.data(), {sums_.data(), maxima_.data()});
  }

  // Gathers the logits that are at least `bound`, and their tokens; returns their number.
  int64_t gather(const float* logits, float bound) {
    const int64_t count = loops_.collect(logits, tokens_, bound, places_.data());
    for (int64_t i = 0; i < count; ++i) gathered_[i] = logits[places_[i]];
    return count;
  }

  // Returns the n-th largest maximum of `blocks` blocks, which at least n values reach.
  float nth_maximum(int64_t n, int64_t blocks) {
    std::copy_n(maxima_.begin(), blocks, candidates_.begin());
    std::nth_element(candidates_.begin(), candidates_.begin() + n - 1, candidates_.begin() + blocks,
                     std::greater<float>());
    return candidates_[n - 1];
  }

  // Copies the weights from `low` to below `high` of `count` weights into `kept`, filled up to whole blocks with zeros;
  // returns the padded number.
  int64_t choose(const float* weights, int64_t count, float low, float high, std::vector<float>& kept) const {
    count = loops_.compress(weights, count, low, high, kept.data());
    const int64_t filled = whole_blocks(count) * kVocabularyBlock;
    std::fill(kept.begin() + count, kept.begin() + filled, 0.0f);
    return filled;
  }

  // Takes the weights that are at least `bound` as candidates; returns their number, padded to whole blocks.
  int64_t choose_candidates(float bound) {
    return choose(weights_.data(), padded(), bound, std::numeric_limits<float>::infinity(), candidates_);
  }

  // Returns the largest bound from `low` on that enough candidates reach. Bisects over bits: weights are at most 1, and
  // positive floats have the order of their bits.
  template <typename Enough>
  float largest_bound(int64_t count, float low, Enough enough) {
    int32_t holds = bits_of(low), fails = bits_of(1.0f) + 1;
    const float* between = candidates_.data();  // candidates that may lie between the bounds; at first all
    Tail above{}, left_out{};                   // candidates of at least `fails`; those of them not in `between`
    for (int step = 1; fails - holds > 1; ++step) {
      const int32_t middle = holds + (fails - holds) / 2;
      Tail tail = loops_.tail(between, count, from_bits(middle));
      tail.count += left_out.count;
      tail.mass += left_out.mass;
      if (enough(tail)) {
        holds = bits_of(tail.lowest);  // never below `middle`
      } else {
        fails = middle;
        above = tail;
      }
      if (step % kStepsToNarrow == 0) {
        count = choose(between, count, from_bits(holds), from_bits(fails), narrowed_);
        between = narrowed_.data();
        left_out = above;
      }
    }
    return from_bits(holds);
  }

  // Returns the smallest weight that top-k and then top-p keep, ties included; 0 if they keep all.
  float lowest_kept(int64_t top_k, double top_p) {
    float lowest = 0;
    int64_t count = 0;
    double mass = total();
    if (top_k > 0 && top_k < count_) {
      lowest = std::max(top_k <= blocks() ? nth_maximum(top_k, blocks()) : 0.0f, FLT_MIN);
      count = choose_candidates(lowest);
      lowest = largest_bound(count, lowest, [top_k](const Tail& tail) { return tail.count >= top_k; });
      mass = loops_.tail(candidates_.data(), count, lowest).mass;
    }
    if (top_p >= 1) return lowest;
    if (lowest == 0) {
      // The sum of all weights below this bound is less than top-p drops.
      lowest = std::max(static_cast<float>((1 - top_p) * mass / static_cast<double>(count_) * 0.999), FLT_MIN);
      count = choose_candidates(lowest);
    }
    return largest_bound(count, lowest, [&](const Tail& tail) { return tail.mass >= top_p * mass; });
  }

  // Returns the first token whose cumulated weight is above `random` times the sum, so never a token of weight 0.
  int64_t draw(double random) const {
    const double target = random * total();
    double before = 0;
    int64_t chosen = 0;
    for (int64_t block = 0; block < blocks(); ++block) {
      if (sums_[block] == 0) continue;
      chosen = block;
      if (before + sums_[block] > target) break;
      before += sums_[block];
    }
    int64_t token = 0;
    for (int64_t i = chosen * kVocabularyBlock; i < (chosen + 1) * kVocabularyBlock; ++i) {
      if (weights_[i] == 0) continue;
      token = i;  // the last token with a weight, if rounding moved the target to the end of the block
      before += weights_[i];
      if (before > target) break;
    }
    return token;
  }

  const VocabularyLoops& loops_;
  const int64_t tokens_;
  int64_t count_ = 0;  // the number of tokens with weights
  std::vector<float> weights_;
  std::vector<double> sums_;
  std::vector<float> maxima_;
  std::vector<int32_t> places_;
  std::vector<float> candidates_;
  std::vector<float> narrowed_;
  std::vector<float> gathered_;
};

// Returns the vocabulary of this thread, which keeps its memory from step to step.
Vocabulary& vocabulary_of(int64_t tokens) {
  static thread_local std::unique_ptr<Vocabulary> kept;
  if (kept == nullptr || kept->tokens() != tokens) kept = std::make_unique<Vocabulary>(tokens);
  return *kept;
}

// Runs `work` with a vocabulary; returns the error, or null.
template <typename Work>
const char* guarded(int64_t tokens, Work work) {
  static thread_local std::string message;
  try {
    work(vocabulary_of(tokens));
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace
}  // namespace sharp::cpu

const char* sharp_sample(const float* logits, int64_t rows, int64_t tokens, const SharpSampling* samplings,
                         int64_t* chosen) {
  return sharp::cpu::guarded(tokens, [&](auto& vocabulary) {
    for (int64_t row = 0; row < rows; ++row) {
      chosen[row] = vocabulary.sample(logits + row * tokens, samplings[row]);
    }
  });
}

const char* sharp_logprobs(const float* logits, int64_t tokens, const int64_t* rows, int64_t count, int64_t top,
                           int64_t* token_ids, double* logprobs) {
  return sharp::cpu::guarded(tokens, [&](auto& vocabulary) {
    for (int64_t i = 0; i < count; ++i) {
      const float* row = logits + rows[i] * tokens;
      int64_t* ids = token_ids + i * (1 + top);
      const double normalizer = vocabulary.most_likely(row, top, ids + 1);
      for (int64_t j = 0; j <= top; ++j) logprobs[i * (1 + top) + j] = row[ids[j]] - normalizer;
    }
  });
}
