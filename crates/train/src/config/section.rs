//! The trait of config sections, and the macros that define sections from lists of keys.

use toml::de::DeValue;

/// One section of the config: its keys, with types, defaults and meaning.
pub(super) trait Section {
    /// Returns the documentation of the section, one element per line.
    fn docs(&self) -> &'static [&'static str] {
        &[]
    }

    /// Returns the attributes that all keys of the section have.
    fn attributes(&self) -> &'static [Attribute] {
        &[]
    }

    /// Returns the keys of the section in the order in which they are explained and written.
    fn keys(&self) -> Vec<Key>;

    fn read_key(&mut self, name: &str, value: &DeValue<'_>) -> Result<(), KeyError>;

    /// Returns the lists of tables of the section by name. Each table is written as `[[section.name]]`.
    fn lists(&self) -> Vec<(&'static str, &dyn TableList)> {
        Vec::new()
    }

    /// Returns the list of this name, if the section has it.
    fn list_mut(&mut self, _name: &str) -> Option<&mut dyn TableList> {
        None
    }
}

/// A list of tables with the same keys.
pub(super) trait TableList {
    fn tables(&self) -> Vec<&dyn Section>;

    /// Returns a table in which no key is set.
    fn default_table(&self) -> Box<dyn Section>;

    fn clear(&mut self);

    fn push(&mut self);

    fn last_mut(&mut self) -> &mut dyn Section;
}

impl<T: Section + Default + 'static> TableList for Vec<T> {
    fn tables(&self) -> Vec<&dyn Section> {
        self.iter().map(|table| table as &dyn Section).collect()
    }

    fn default_table(&self) -> Box<dyn Section> {
        Box::new(T::default())
    }

    fn clear(&mut self) {
        self.clear();
    }

    fn push(&mut self) {
        self.push(T::default());
    }

    fn last_mut(&mut self) -> &mut dyn Section {
        self.as_mut_slice().last_mut().expect("a table was added")
    }
}

/// A key of a section, with its documentation and value.
pub(super) struct Key {
    /// The key's name within the section.
    pub(super) name: &'static str,
    /// The key's documentation, one element per line.
    pub(super) docs: &'static [&'static str],
    /// The key's attributes for the comparison of configs between runs and ranks.
    pub(super) attributes: &'static [Attribute],
    /// The accepted values, as a phrase that follows "expected".
    pub(super) expected: String,
    /// The key's value, or `None` if the key is left out of a written config.
    pub(super) value: Option<toml::Value>,
}

/// An attribute of a key for the comparison of configs between runs and ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attribute {
    /// `@no_effect_on_training`: a run may resume with another value without a notice.
    NoEffectOnTraining,
    /// `@per_rank`: ranks may have different values, because the key concerns one host or process only, or is a path whose contents are
    /// compared instead.
    PerRank,
}

/// The reason why a key was not set.
pub(super) enum KeyError {
    Unknown,
    /// The value is invalid. The text describes the accepted values.
    InvalidValue(String),
}

/// Defines a section: a struct with one field per key, its defaults, and its [`Section`] implementation.
///
/// A key is `name: Type = default;` or, with limits, `name: Type = default, within range;`. If the key's name is not a valid field name,
/// the field's name comes first: `field as "name": Type = default;`. An [`Attribute`] is written before the key, or before the section if
/// it applies to all of its keys. Lists of tables follow the keys: `lists { name: Table; }`. With `embeds { field: Other; }`, the keys of
/// another [`Section`] become keys of this one, after its own.
macro_rules! config_section {
    (
        $(#[doc = $doc:literal])+
        $(@$section_attribute:ident)* $section:ident {
            $(
                $(#[doc = $key_doc:literal])+
                $(@$attribute:ident)* $key:ident $(as $word:literal)?: $type:ty = $default:expr $(, within $range:expr)?;
            )+
            $(embeds { $(#[doc = $embedded_doc:literal])+ $embedded:ident: $other:ty; })?
            $(lists { $($(#[doc = $list_doc:literal])+ $list:ident: $table:ty;)+ })?
        }
    ) => {
        $(#[doc = $doc])+
        #[derive(Debug, Clone, PartialEq)]
        pub struct $section {
            $($(#[doc = $key_doc])+ pub $key: $type,)+
            $($(#[doc = $embedded_doc])+ pub $embedded: $other,)?
            $($($(#[doc = $list_doc])+ pub $list: Vec<$table>,)+)?
        }

        impl Default for $section {
            fn default() -> Self {
                $section {
                    $($key: $default,)+
                    $($embedded: Default::default(),)?
                    $($($list: Vec::new(),)+)?
                }
            }
        }

        impl $crate::config::section::Section for $section {
            fn docs(&self) -> &'static [&'static str] {
                &[$($doc),+]
            }

            fn attributes(&self) -> &'static [$crate::config::section::Attribute] {
                &[$(config_section!(@attribute $section_attribute)),*]
            }

            fn keys(&self) -> Vec<$crate::config::section::Key> {
                let keys = vec![$(
                    $crate::config::section::Key {
                        name: config_section!(@name $key $($word)?),
                        docs: &[$($key_doc),+],
                        attributes: &[$(config_section!(@attribute $attribute)),*],
                        expected: config_section!(@expected $type $(, $range)?),
                        value: $crate::config::value::ConfigValue::write(&self.$key),
                    },
                )+];
                $(let keys = keys.into_iter().chain(self.$embedded.keys()).collect();)?
                keys
            }

            fn read_key(
                &mut self,
                name: &str,
                value: &toml::de::DeValue<'_>,
            ) -> Result<(), $crate::config::section::KeyError> {
                use $crate::config::section::KeyError;
                match name {
                    $(config_section!(@name $key $($word)?) => {
                        self.$key =
                            config_section!(@read $type, value $(, $range)?).map_err(KeyError::InvalidValue)?;
                    })+
                    _ => {
                        $(return self.$embedded.read_key(name, value);)?
                        #[allow(unreachable_code)]
                        return Err(KeyError::Unknown);
                    }
                }
                Ok(())
            }

            fn lists(&self) -> Vec<(&'static str, &dyn $crate::config::section::TableList)> {
                vec![$($((stringify!($list), &self.$list as _),)+)?]
            }

            fn list_mut(&mut self, name: &str) -> Option<&mut dyn $crate::config::section::TableList> {
                match name {
                    $($(stringify!($list) => Some(&mut self.$list),)+)?
                    _ => None,
                }
            }
        }
    };
    (@attribute no_effect_on_training) => { $crate::config::section::Attribute::NoEffectOnTraining };
    (@attribute per_rank) => { $crate::config::section::Attribute::PerRank };
    (@name $key:ident) => { stringify!($key) };
    (@name $key:ident $word:literal) => { $word };
    (@expected $type:ty) => { <$type as $crate::config::value::ConfigValue>::expected() };
    (@expected $type:ty, $range:expr) => { $crate::config::value::expected_within::<$type>(&$range) };
    (@read $type:ty, $value:expr) => { <$type as $crate::config::value::ConfigValue>::read($value) };
    (@read $type:ty, $value:expr, $range:expr) => {
        $crate::config::value::read_within::<$type>($value, &$range)
    };
}

/// Defines [`Sections`](super::sections::Sections), and an accessor of each section on [`Config`](super::Config).
macro_rules! config_sections {
    ($($name:ident: $section:ident,)+) => {
        /// All sections, read but not yet checked against each other.
        #[derive(Debug, Clone, PartialEq, Default)]
        pub(super) struct Sections {
            $(pub(super) $name: $section,)+
        }

        impl Sections {
            /// Names of the sections, in the order in which they are explained and written.
            pub(super) const NAMES: &'static [&'static str] = &[$(stringify!($name)),+];

            pub(super) fn get(&self, name: &str) -> Option<&dyn Section> {
                match name {
                    $(stringify!($name) => Some(&self.$name),)+
                    _ => None,
                }
            }

            /// Returns the section of this name, to set its keys.
            pub(super) fn get_mut(&mut self, name: &str) -> Option<&mut dyn Section> {
                match name {
                    $(stringify!($name) => Some(&mut self.$name),)+
                    _ => None,
                }
            }

            pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, &dyn Section)> {
                [$((stringify!($name), &self.$name as &dyn Section)),+].into_iter()
            }
        }

        impl $crate::config::Config {
            $(
                #[doc = concat!("The section `[", stringify!($name), "]`.")]
                pub fn $name(&self) -> &$section {
                    &self.sections.$name
                }
            )+
        }
    };
}

pub(super) use {config_section, config_sections};
