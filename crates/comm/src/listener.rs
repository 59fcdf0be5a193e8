//! Callbacks for events.

use std::fmt;
use std::sync::Arc;

/// Is told of something, from the thread that it happens on.
pub struct Listener<T: ?Sized>(Arc<dyn Fn(&T) + Send + Sync>);

/// Is told lines for the user, from the thread that joins or that writes reports.
pub type LineListener = Listener<str>;

impl<T: ?Sized> Listener<T> {
    /// Calls `listener`, which must not take long: the thread waits for it.
    pub fn new(listener: impl Fn(&T) + Send + Sync + 'static) -> Self {
        Listener(Arc::new(listener))
    }

    pub(crate) fn tell(&self, event: &T) {
        (self.0)(event);
    }
}

// Derived, these would ask for a `T` that has them.
impl<T: ?Sized> Clone for Listener<T> {
    fn clone(&self) -> Self {
        Listener(Arc::clone(&self.0))
    }
}

impl<T: ?Sized> fmt::Debug for Listener<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listener")
    }
}
