//! Callbacks that receive events.

use std::fmt;
use std::sync::Arc;

/// A callback that receives events, on the thread where they occur.
pub struct Listener<T: ?Sized>(Arc<dyn Fn(&T) + Send + Sync>);

/// A callback that receives lines of text for the user, on the thread that joins a world or writes reports.
pub type LineListener = Listener<str>;

impl<T: ?Sized> Listener<T> {
    /// Wraps `listener`, which must return quickly, because the thread that calls it waits.
    pub fn new(listener: impl Fn(&T) + Send + Sync + 'static) -> Self {
        Listener(Arc::new(listener))
    }

    pub(crate) fn notify(&self, event: &T) {
        (self.0)(event);
    }
}

// Derived implementations would require `T: Clone` and `T: Debug`.
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
