crate::named! {
    /// The purpose of an allocation. Reports list the variants in this order. The names are field names in reports and `metrics.jsonl`.
    pub enum Category {
        /// The model's weights.
        Parameters = "parameters",
        /// Gradients of the weights, including the partial sums of gradient accumulation.
        Gradients = "gradients",
        /// Optimizer state.
        Optimizer = "optimizer",
        /// Values saved for backward, their gradients, and the workspace of kernels.
        Activations = "activations",
        /// Message buffers, and full units in transit: gathered parameters, and gradients before they are sharded.
        Communication = "communication",
    }
}
