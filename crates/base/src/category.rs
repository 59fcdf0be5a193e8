crate::named! {
    /// What a piece of memory is for, in the order of reports. Names are fields of reports and of `metrics.jsonl`.
    pub enum Category {
        /// Weights.
        Parameters = "parameters",
        /// Gradients of the weights, with the partial sums of gradient accumulation.
        Gradients = "gradients",
        /// Optimizer state.
        Optimizer = "optimizer",
        /// Values saved for backward, their gradients, and what kernels need meanwhile.
        Activations = "activations",
        /// Buffers of messages, and whole units on their way: parameters that are gathered for use, gradients that are sharded.
        Communication = "communication",
    }
}
