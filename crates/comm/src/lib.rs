//! Groups, collectives and transports.
