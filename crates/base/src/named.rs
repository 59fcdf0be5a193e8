/// The error returned when a text is not one of the expected names. Holds the expected names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected one of {}", .0.join(", "))]
pub struct UnknownName(pub &'static [&'static str]);

/// Declares an enum whose variants have names. Generates the constant `ALL`, `name` and `named`, [`FromStr`](std::str::FromStr) and
/// [`Display`](std::fmt::Display).
///
/// ```
/// trireme_base::named! {
///     /// A fruit.
///     pub enum Fruit {
///         /// Grows on trees.
///         Apple = "apple",
///     }
/// }
/// assert_eq!(Fruit::named("apple"), Some(Fruit::Apple));
/// assert_eq!(Fruit::ALL.map(Fruit::name), ["apple"]);
/// assert_eq!("pear".parse::<Fruit>().unwrap_err().to_string(), "expected one of apple");
/// ```
#[macro_export]
macro_rules! named {
    (
        $(#[$meta:meta])*
        pub enum $enum:ident { $($(#[$variant_meta:meta])* $variant:ident = $name:literal,)+ }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $enum {
            $($(#[$variant_meta])* $variant,)+
        }

        impl $enum {
            /// All variants, in the order of their declaration.
            pub const ALL: [$enum; [$($name),+].len()] = [$($enum::$variant),+];

            /// Returns the variant's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $($enum::$variant => $name,)+
                }
            }

            /// Returns the variant with this name, if there is one.
            pub fn named(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|known| known.name() == name)
            }
        }

        impl ::std::str::FromStr for $enum {
            type Err = $crate::UnknownName;

            fn from_str(name: &str) -> ::std::result::Result<Self, Self::Err> {
                Self::named(name).ok_or($crate::UnknownName(&[$($name),+]))
            }
        }

        impl ::std::fmt::Display for $enum {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.pad(self.name())
            }
        }
    };
}
