"""A traced graph made small, as by `torch.onnx.export(optimize=True)` but with the rewrite rules that can apply.

onnxscript tries some 60 rules on every node, twice; most are for convolutions, clips and batch norms. That took 5 to
8 s of SmolLM2's export.
"""

import onnx_ir
from onnx_ir.passes import Sequential, common
from onnxscript import optimizer
from onnxscript.rewriter import onnx_fusions, rewrite
from onnxscript.rewriter.rules import common as rules

from sharp.exporter.graph import streamlining

RULES = (
    rules.add_0_rule,
    rules.sub_0_rule,
    rules.mul_by_1_rule,
    rules.div_by_1_rule,
    rules.cast_cast_rule,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.no_op_transpose_rule,
    rules.transpose_transpose_rule,
    rules.reshape_reshape_rule,
    rules.squeeze_reshape_1d_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.materialize_reshape_shape_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
)
ROUNDS = 2  # what one folds the other may rewrite


def simplify(graph: onnx_ir.Model) -> None:
    """Fold constants, leave out nodes that do nothing, and make one node of what is one, last products of one input."""
    for _ in range(ROUNDS):
        optimizer.fold_constants_ir(graph, onnx_shape_inference=True)
        rewrite(graph, RULES)
    tidy = Sequential(
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )
    tidy(graph)
    onnx_fusions.fuse(graph)
    rewrite(graph, streamlining.ROTATION_RULES)
    rewrite(graph, (rules.reshape_reshape_rule, *streamlining.RESHAPE_RULES))
    streamlining.merge_products(graph)
    tidy(graph)
