#include "paged_attention.h"

#include <algorithm>
#include <vector>

#include "buffers.h"
#include "finish.h"
#include "isa.h"
#include "plan.h"
#include "reach.h"
#include "screen.h"
#include "store.h"
#include "temperature.h"

namespace sharp::cpu {
namespace {

constexpr int64_t kTilesFinishedHere = 4;  // so few tiles are finished before another thread would start

// Computes the temperature of a row, or its threshold and output.
void solve_row(const Problem& problem, const Loops& loops, const Tile& tile, const TileBuffers& buffers, int64_t row) {
  merge_observations(buffers.parts(), buffers.count(), row);
  if (buffers.part(0).states[row].visible == 0) return;
  if (loops.selects()) return loops.resolve(problem, tile, buffers.parts(), buffers.count(), row);
  find_temperature(problem, buffers.parts(), buffers.count(), row);
}

// Computes a tile; returns whether its output is finite.
bool attend_tile(const Problem& problem, const Loops& loops, const Work& work, ThreadBuffers& buffers) {
  buffers.tile.reset(problem, work.tile, work.parts, loops);
  const Part& part = buffers.tile.part(0);
  if (loops.keeps_logits()) {
    if (is_screened(problem, work.tile, loops)) {
      loops.bound(problem, work.tile, part, buffers.scratch());
      loops.merge_bounds(problem, work.tile, &part, 1);
      loops.score_doubtful(problem, work.tile, part, buffers.scratch());
    } else {
      loops.score(problem, work.tile, part, buffers.scratch());
    }
    for (int64_t row = 0; row < work.tile.rows(); ++row) solve_row(problem, loops, work.tile, buffers.tile, row);
    loops.weigh(problem, work.tile, part, buffers.scratch());
  } else {
    loops.stream(problem, work.tile, part, buffers.scratch());
  }
  return finish_tile(problem, work.tile, &part, 1, true);
}

// Computes a tile again whose output is not finite. Values of keys without a weight may be the cause, because 0 times
// NaN is NaN.
void attend_row_by_row(const Problem& problem, const Loops& loops, const Tile& tile, ThreadBuffers& buffers) {
  Work work{tile, {{tile.key_begin, tile.key_end}}};
  work.tile.row_by_row = true;
  attend_tile(problem, loops, work, buffers);
}

void attend_whole_tile(const Problem& problem, const Loops& loops, const Work& work, ThreadBuffers& buffers) {
  if (!attend_tile(problem, loops, work, buffers)) attend_row_by_row(problem, loops, work.tile, buffers);
}

// A task of the first phase: a whole tile, or one part of a split tile.
struct Task {
  const Work* work;
  TileBuffers* split;  // null: the tile is not split
  int64_t part;
};

class Attention {
 public:
  Attention(const Problem& problem, const ParallelFor& parallel_for)
      : problem_(problem),
        parallel_for_(parallel_for),
        loops_(find_loops(problem.attributes)),
        works_(plan_work(problem, loops_.keeps_logits())),
        pool_(problem) {
    for (const Work& work : works_) {
      if (work.parts.size() == 1) {
        tasks_.push_back({&work, nullptr, 0});
        continue;
      }
      split_.push_back({&work, std::make_unique<TileBuffers>()});
      TileBuffers* buffers = split_.back().buffers.get();
      buffers->reset(problem, work.tile, work.parts, loops_);
      for (int64_t part = 0; part < buffers->count(); ++part) tasks_.push_back({&work, buffers, part});
    }
  }

  void run() {
    for_tasks([&](const Task& task, ThreadBuffers& buffers) {
      if (task.split == nullptr) return attend_whole_tile(problem_, loops_, *task.work, buffers);
      const auto first_pass = is_screened(problem_, task.work->tile, loops_) ? loops_.bound
                              : loops_.keeps_logits()                        ? loops_.score
                                                                             : loops_.stream;
      first_pass(problem_, task.work->tile, task.split->part(task.part), buffers.scratch());
    });
    if (split_.empty()) return;
    score_doubtful();
    solve_rows();
    if (loops_.weigh != nullptr && (!loops_.selects() || streams_values()))
      for_tasks([&](const Task& task, ThreadBuffers& buffers) {
        if (task.split == nullptr) return;
        loops_.weigh(problem_, task.work->tile, task.split->part(task.part), buffers.scratch());
      });
    const auto finish = [&](int64_t index) {
      const Split& split = split_[index];
      const Tile& tile = split.work->tile;
      if (finish_tile(problem_, tile, split.buffers->parts(), split.buffers->count(), loops_.keeps_logits())) return;
      std::unique_ptr<ThreadBuffers> buffers = pool_.take();
      attend_row_by_row(problem_, loops_, tile, *buffers);
      pool_.give_back(std::move(buffers));
    };
    const int64_t count = static_cast<int64_t>(split_.size());
    if (count > kTilesFinishedHere) return parallel_for_(count, finish);
    for (int64_t index = 0; index < count; ++index) finish(index);
  }

 private:
  struct Split {
    const Work* work;
    std::unique_ptr<TileBuffers> buffers;
  };

  // Makes the second pass over the keys of split tiles that are screened.
  void score_doubtful() {
    bool any = false;
    for (const Split& split : split_) {
      if (!is_screened(problem_, split.work->tile, loops_)) continue;
      any = true;
      loops_.merge_bounds(problem_, split.work->tile, split.buffers->parts(), split.buffers->count());
    }
    if (!any) return;
    for_tasks([&](const Task& task, ThreadBuffers& buffers) {
      if (task.split != nullptr && is_screened(problem_, task.work->tile, loops_))
        loops_.score_doubtful(problem_, task.work->tile, task.split->part(task.part), buffers.scratch());
    });
  }

  // Solves all rows of split tiles. Temperatures are fast to compute; thresholds are worth a task each.
  void solve_rows() {
    if (!loops_.keeps_logits()) return;
    const auto solve = [&](int64_t index) {
      const Split& split = split_[index / kMaxTileRows];
      const int64_t row = index % kMaxTileRows;
      if (row < split.work->tile.rows()) solve_row(problem_, loops_, split.work->tile, *split.buffers, row);
    };
    const int64_t count = static_cast<int64_t>(split_.size()) * kMaxTileRows;
    if (loops_.selects()) return parallel_for_(count, solve);
    for (int64_t index = 0; index < count; ++index) solve(index);
  }

  // Whether any row of a split tile has left values to `weigh`.
  bool streams_values() const {
    for (const Split& split : split_)
      for (int64_t row = 0; row < split.work->tile.rows(); ++row)
        if (split.buffers->part(0).states[row].streamed > 0) return true;
    return false;
  }

  template <typename Body>
  void for_tasks(Body body) {
    parallel_for_(static_cast<int64_t>(tasks_.size()), [&](int64_t index) {
      std::unique_ptr<ThreadBuffers> buffers = pool_.take();
      body(tasks_[index], *buffers);
      pool_.give_back(std::move(buffers));
    });
  }

  const Problem& problem_;
  const ParallelFor& parallel_for_;
  const Loops loops_;
  const std::vector<Work> works_;
  BufferPool pool_;
  std::vector<Task> tasks_;
  std::vector<Split> split_;
};

}  // namespace

void paged_attention(const Problem& problem, const ParallelFor& parallel_for) {
  store_tokens(problem, parallel_for);
  const std::vector<int64_t> reach = reach_of(problem);
  Problem reached = problem;
  reached.reach = reach.empty() ? nullptr : reach.data();
  Attention(reached, parallel_for).run();
}

}  // namespace sharp::cpu
