"""The tests that hold each semantic of training."""

from __future__ import annotations

#: semantic → its tests: of `test_semantics` in any case, elsewhere with other models, in detail
SEMANTICS: dict[str, tuple[str, ...]] = {
    "accumulation over different micro-batches, zero_grad both ways": (
        "test_semantics.test_micro_batches_add_up",
        "test_zoo.test_accumulation_over_different_batches",
        "test_weights_semantics.test_different_micro_batches_add_up",
    ),
    "two forwards before a backward, retain_graph, a dropped loss": (
        "test_semantics.test_graphs_kept_and_dropped",
        "test_zoo.test_two_forwards_before_a_backward",
        "test_zoo.test_a_retained_graph_runs_backward_twice",
        "test_weights_semantics.test_graphs_kept_two_forwards_and_a_dropped_loss",
    ),
    "an exception in forward, in backward or in a hook": (
        "test_semantics.test_exceptions_leave_nothing_behind",
        "test_backend_runs.test_a_disk_that_fails_fails_the_step_and_loses_nothing",
        "test_weights_semantics.test_training_goes_on_after_an_exception_in_a_hook",
    ),
    "no_grad, inference_mode, eval; dropout with the same seed; BatchNorm": (
        "test_semantics.test_scores_between_steps_with_dropout_and_buffers",
        "test_zoo.test_inference_between_training_steps",
        "test_backend.test_buffers_that_forward_updates",
        "test_weights_semantics.test_scores_between_steps",
    ),
    "tied and shared weights, frozen parameters, LoRA": (
        "test_semantics.test_tied_frozen_and_adapted",
        "test_zoo.test_frozen_parameters_get_no_gradient",
        "test_weights_kinds.test_small_trainable_parts_on_a_frozen_base",
        "test_weights_kinds.test_tied_shared_and_unused_parameters",
    ),
    "mixed precision and bfloat16": (
        "test_semantics.test_mixed_precision",
        "test_weights_semantics.test_autocast",
    ),
    "dynamic shapes and recompiles": (
        "test_semantics.test_batches_of_many_sizes",
        "test_backend.test_sizes_that_do_not_fit_the_plan_get_one_of_their_own",
        "test_weights_semantics.test_batches_of_many_sizes",
    ),
    "graph breaks, models compiled block by block": (
        "test_semantics.test_graph_breaks",
        "test_semantics.test_block_by_block",
        "test_regions.test_other_ways_of_training_are_exact_too",
    ),
    "torch.func inside of the compiled function": (
        "test_semantics.test_functional_transforms",
        "test_backend.test_functional_transforms_inside_the_function",
    ),
    "state_dict, load_state_dict, deepcopy, torch.save": (
        "test_semantics.test_saved_loaded_and_copied",
        "test_weights.test_copies_are_models_of_their_own",
        "test_weights_semantics.test_an_optimizer_s_state_goes_across",
    ),
    "two models in one process": (
        "test_semantics.test_two_models",
        "test_zoo.test_two_models_in_one_process",
        "test_weights.test_two_models_at_once",
    ),
    "fork, and workers of a DataLoader": (
        "test_semantics.test_workers_that_are_forked",
        "test_spill_forks.test_a_forked_child_is_told_and_its_parent_goes_on",
    ),
    "double backward": (
        "test_semantics.test_double_backward_is_refused_and_training_goes_on",
        "test_semantics.test_a_gradient_penalty_inside_of_the_compiled_function",
        "test_semantics.test_a_gradient_penalty_of_the_plain_model",
    ),
}
